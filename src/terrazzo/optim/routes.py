"""Messages that bring each tensor of a group on one mesh to its owner, a rank that then has it whole.

Pure computation on layouts, without communication. Owners are chosen so that all ranks have about the same work.
Where several ranks hold the same piece of a tensor, the one sends it that differs from the owner only along mesh dims
that shard the tensor; on the way back every rank gets its piece from the owner.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from terrazzo.layout import Box, Layout, Shard

Coordinate = tuple[int, ...]


class Piece(NamedTuple):
    """A box of one tensor of the group, as a part of a message."""

    tensor: int
    box: Box


class Routes(NamedTuple):
    """The messages of one rank, by the other rank's position on the mesh, and by tensor within a message."""

    owners: tuple[int, ...]  # for each tensor the owner's position on the mesh
    to_owners: tuple[tuple[Piece, ...], ...]
    from_holders: tuple[tuple[Piece, ...], ...]
    to_holders: tuple[tuple[Piece, ...], ...]
    from_owners: tuple[tuple[Piece, ...], ...]


def balanced(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """A rank for each cost so that the sums are balanced: the largest first, each to the rank with the least so far.

    >>> balanced([1, 5, 2, 2], 2)
    (1, 0, 1, 1)
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    result = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        result[i] = rank
        heapq.heapreplace(loads, (load + costs[i], rank))
    return tuple(result)


def routes_of(layouts: Sequence[Layout], costs: Sequence[float], here: Coordinate) -> Routes:
    """The messages of the rank at `here` for tensors with these layouts, which are all on one mesh."""
    mesh_shape = layouts[0].mesh_shape
    size = prod(mesh_shape)
    owners = balanced(costs, size)
    messages: list[list[list[Piece]]] = [[[] for _ in range(size)] for _ in range(4)]
    to_owners, from_holders, to_holders, from_owners = messages
    position = _position(here, mesh_shape)
    for i, (layout, owner) in enumerate(zip(layouts, owners, strict=True)):
        mine = layout.box(here)
        if not mine.is_empty:
            if here == _sender(layout, here, _coordinate(owner, mesh_shape)):
                to_owners[owner].append(Piece(i, mine))
            from_owners[owner].append(Piece(i, mine))
        if owner == position:
            boxes = _boxes(layout)
            for rank, coordinate in enumerate(product(*map(range, mesh_shape))):
                box = boxes[_sharding(layout, coordinate)]
                if not box.is_empty:
                    if coordinate == _sender(layout, coordinate, here):
                        from_holders[rank].append(Piece(i, box))
                    to_holders[rank].append(Piece(i, box))
    return Routes(owners, *(tuple(map(tuple, each)) for each in messages))


def _sender(layout: Layout, holder: Coordinate, owner: Coordinate) -> Coordinate:
    """The rank that sends the piece to the owner, of all ranks that hold the same piece as `holder`."""
    placed = zip(layout.placements, holder, owner, strict=True)
    return tuple(at if isinstance(placement, Shard) else to for placement, at, to in placed)


def _sharding(layout: Layout, coordinate: Coordinate) -> Coordinate:
    """The coordinate along the mesh dims that shard: the box depends on these only."""
    return tuple(at if isinstance(p, Shard) else 0 for p, at in zip(layout.placements, coordinate, strict=True))


def _boxes(layout: Layout) -> dict[Coordinate, Box]:
    ranges = [
        range(n if isinstance(p, Shard) else 1) for p, n in zip(layout.placements, layout.mesh_shape, strict=True)
    ]
    return {coordinate: layout.box(coordinate) for coordinate in product(*ranges)}


def _position(coordinate: Coordinate, mesh_shape: Coordinate) -> int:
    position = 0
    for at, n in zip(coordinate, mesh_shape, strict=True):
        position = position * n + at
    return position


def _coordinate(position: int, mesh_shape: Coordinate) -> Coordinate:
    result: list[int] = []
    for n in reversed(mesh_shape):
        position, at = divmod(position, n)
        result.append(at)
    return tuple(reversed(result))


__all__ = ["Piece", "Routes", "balanced", "routes_of"]
