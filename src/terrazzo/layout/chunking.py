"""How a length is divided among parts: the rule of `torch.chunk`, in the one place that knows it.

Every part but the last non-empty one has `ceil(size / parts)` elements.  So parts may be uneven, and trailing parts may
be empty: 5 over 4 is 2, 2, 1, 0.  Unlike `torch.chunk` itself, which returns fewer parts in that case, there are
always exactly as many parts as were asked for.
"""

from terrazzo.errors import LayoutError


def chunk_span(size: int, parts: int, index: int) -> tuple[int, int]:
    """The (offset, length) of part `index` when `size` is divided into `parts`.

    An empty part lies at the end.

    >>> [chunk_span(5, 4, index) for index in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    _check(size, parts)
    if not 0 <= index < parts:
        raise LayoutError(f"there is no part {index} among {parts} parts")
    step = -(-size // parts)
    offset = min(size, step * index)
    return offset, min(size, offset + step) - offset


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """The length of each of `parts` parts of `size`; trailing ones may be 0.

    >>> chunk_sizes(7, 4), chunk_sizes(0, 2)
    ((2, 2, 2, 1), (0, 0))
    """
    _check(size, parts)
    step = -(-size // parts)
    return tuple(max(0, min(step, size - step * index)) for index in range(parts))


def _check(size: int, parts: int) -> None:
    if size < 0:
        raise LayoutError(f"a negative length cannot be divided: {size}")
    if parts < 1:
        raise LayoutError(f"a length is divided into at least one part, not {parts}")
