"""The shape that shapes broadcast to.

`torch.broadcast_shapes` computes it too, but imports sympy for that, which takes longer than the rest of the first
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.errors import DTensorError


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape of tensors of these shapes.

    >>> broadcast_shapes((8, 1, 6), (7, 1), ())
    (8, 7, 6)
    """
    result: list[int] = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for d, size in enumerate(shape, len(result) - len(shape)):
            if size == 1 or size == result[d]:
                continue
            if result[d] != 1:
                raise DTensorError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} cannot be broadcast together")
            result[d] = size
    return tuple(result)
