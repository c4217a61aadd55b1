"""How a length is divided among parts: the rule of `torch.chunk`. No other module repeats it.

Every part but the last non-empty one has `ceil(size / parts)` elements. So parts may be uneven, and trailing parts may
be empty: 5 over 4 is 2, 2, 1, 0. Unlike `torch.chunk` itself, which returns fewer parts in that case, there are
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
    runs = chunk_runs(size, parts)
    firsts = [first for first, _ in runs]
    sizes: tuple[int, ...] = ()
    for (first, length), stop in zip(runs, [*firsts[1:], parts], strict=True):
        sizes += (length,) * (stop - first)
    return sizes


def chunk_runs(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The parts grouped by length, as (first part of this length, length): at most three groups.

    For work that depends on lengths alone and must not visit every one of thousands of parts.

    >>> chunk_runs(5, 8), chunk_runs(7, 4), chunk_runs(8192, 4096)
    (((0, 1), (5, 0)), ((0, 2), (3, 1)), ((0, 2),))
    """
    _check(size, parts)
    if not size:
        return ((0, 0),)
    step = -(-size // parts)
    full, rest = divmod(size, step)
    runs = [(0, step)]
    if rest:
        runs.append((full, rest))
        full += 1
    if full < parts:
        runs.append((full, 0))
    return tuple(runs)


def chunks_between(size: int, parts: int, start: int, stop: int) -> range:
    """The parts that have elements from `start` (inclusive) to `stop` (exclusive), which lie within `size`.

    >>> chunks_between(10, 4, 2, 7), chunks_between(10, 4, 3, 3)
    (range(0, 3), range(0, 0))
    """
    _check(size, parts)
    if start >= stop:
        return range(0)
    step = -(-size // parts)
    return range(start // step, (stop - 1) // step + 1)


def _check(size: int, parts: int) -> None:
    if size < 0:
        raise LayoutError(f"a negative length cannot be divided: {size}")
    if parts < 1:
        raise LayoutError(f"a length is divided into at least one part, not {parts}")
