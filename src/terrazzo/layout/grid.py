"""A tensor cut into the cells of a grid, and who holds each: what every picture of a layout is drawn from.

Whatever the mesh, the parts of a tensor form a grid: the cuts of one tensor dim do not depend on those of another.
Parts that other programs have cut need not form one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from terrazzo.layout.box import Box

Span = tuple[int, int]  # start, stop


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a tensor, and who holds each.

    Attributes:
        shape: of the tensor.
        starts: for each dim, where its parts begin; of a dim without elements there are none.
        holders: for each cell, in row-major order.
    """

    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]

    def spans(self, dim: int) -> list[Span]:
        """The parts of a dim.

        >>> Grid((5,), ((0, 3),), ((0,), (1,))).spans(0)
        [(0, 3), (3, 5)]
        """
        return list(pairwise((*self.starts[dim], self.shape[dim])))

    def folded(self) -> tuple[list[int], int | None]:
        """As rows and columns: the dims whose parts are rows, together, and the one whose parts are columns.

        The last dim lies, all others stand, and only those that are cut count.

        >>> Grid((4, 6), ((0, 2), (0,)), ((0,), (1,))).folded()
        ([0], None)
        """
        *others, last = [dim if len(starts) > 1 else None for dim, starts in enumerate(self.starts)] or [None]
        return [dim for dim in others if dim is not None], last


def grid_of(shape: tuple[int, ...], boxes: Mapping[int, Box]) -> Grid | None:
    """The grid of a tensor's boxes, by holder; None if they form none. Who holds an empty box is left out.

    >>> grid_of((4, 6), {0: Box((0, 0), (4, 3)), 1: Box((0, 3), (4, 3)), 2: Box((0, 3), (4, 3))})
    Grid(shape=(4, 6), starts=((0,), (0, 3)), holders=((0,), (1, 2)))
    >>> grid_of((4,), {0: Box((0,), (3,)), 1: Box((2,), (2,))}) is None
    True
    """
    held = {holder: box for holder, box in boxes.items() if not box.is_empty}
    if not held:
        return Grid(shape, tuple(() if 0 in shape else (0,) for _ in shape), ()) if 0 in shape else None
    starts = tuple(tuple(sorted({box.offsets[dim] for box in held.values()})) for dim in range(len(shape)))
    places = [{start: i for i, start in enumerate(each)} for each in starts]
    stops = [(*each[1:], size) for each, size in zip(starts, shape, strict=True)]
    holders: list[list[int]] = [[] for _ in range(prod(map(len, starts)))]
    if any(each[0] != 0 for each in starts) or len(holders) > len(held):
        return None
    for holder, box in held.items():
        cell = 0
        for dim, (offset, end) in enumerate(zip(box.offsets, box.ends, strict=True)):
            place = places[dim][offset]
            if stops[dim][place] != end:
                return None
            cell = cell * len(starts[dim]) + place
        holders[cell].append(holder)
    return Grid(shape, starts, tuple(map(tuple, holders))) if all(holders) else None
