"""The order in which mesh dims cut one tensor dim, written into the placements as PyTorch does, and read from them.

If a mesh dim cuts after later mesh dims, its placement is shown as a `_StridedShard`, whose factor is the number of
parts into which those cut before. Mesh dims of size 1 cut nothing, so their place in the order is not shown.

A `_StridedShard` that says no order is itself a placement: each of `split_factor` equal pieces of its dim is cut (a
weight in which several are packed, each of which is sharded). Such a layout is *packed*: what a rank holds is not one
box, but it is one where the dim is seen as two, pieces and their elements (`unpacked`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from terrazzo.errors import PlacementsError
from terrazzo.layout.placement import CUTS, Placement, Shard, _StridedShard


def with_order(
    placements: Sequence[Placement], mesh_shape: Sequence[int], order: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements of a layout, with its order written into them.

    >>> with_order([Shard(0), Shard(0)], (2, 4), (1, 0))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    result: list[Placement] = []
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            before = order[: order.index(m)]
            # A mesh dim that cuts earlier although it comes later in the mesh.
            factor = prod(mesh_shape[k] for k in before if k > m and placements[k] is p)
            p = p if factor == 1 else _StridedShard(p.dim, split_factor=factor)
        result.append(p)
    return tuple(result)


def without_order(
    shown: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """The placements and the order that `with_order` shows so; dims must not be negative.

    >>> without_order([_StridedShard(0, split_factor=4), Shard(0)], (2, 4))
    ((Shard(dim=0), Shard(dim=0)), (1, 0))
    """
    placements = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in shown)
    nesting: dict[Placement, list[int]] = {}
    for m in reversed(range(len(placements))):
        p = shown[m]
        if not isinstance(p, CUTS):
            continue
        outer = nesting.setdefault(placements[m], [])
        factor = p.split_factor if isinstance(p, _StridedShard) else 1
        at = next((i for i in range(len(outer) + 1) if prod(mesh_shape[k] for k in outer[:i]) == factor), None)
        if at is None:
            raise PlacementsError(
                f"{p!r} on mesh dim {m} of {tuple(mesh_shape)} does not correspond to an order of the mesh dims that "
                f"shard dim {p.dim}, in {list(shown)}; nor can it cut {factor} equal pieces of a dim, "
                "for which no other mesh dim may cut that dim, whose length must be a multiple of pieces times ranks: "
                "redistribute the tensor to ordinary placements first"
            )
        outer.insert(at, m)
    return placements, full_order(nesting.values(), len(placements))


def is_packed(shown: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the placements have `_StridedShard`s that cut pieces of their dims; dims must not be negative.

    >>> [is_packed([_StridedShard(0, split_factor=2)], (4,), (length,)) for length in (16, 12)]
    [True, False]
    """
    dims = [p.dim for p in shown if isinstance(p, CUTS)]
    strided = [(p, n) for p, n in zip(shown, mesh_shape, strict=True) if isinstance(p, _StridedShard)]
    return bool(strided) and all(
        p.split_factor > 1 and dims.count(p.dim) == 1 and shape[p.dim] % (p.split_factor * n) == 0 for p, n in strided
    )


def unpacked(
    shown: Sequence[Placement], shape: Sequence[int], pieces: Mapping[int, int]
) -> tuple[list[Placement], list[int]]:
    """Placements and shape where each dim of `pieces` is seen as two: so many pieces, and the elements of a piece.

    >>> unpacked([_StridedShard(1, split_factor=2), Shard(2)], (3, 8, 5), {1: 2})
    ([Shard(dim=2), Shard(dim=3)], [3, 2, 4, 5])
    """
    whole: list[int] = []
    first: list[int] = []
    for dim, length in enumerate(shape):
        first.append(len(whole))
        whole += [pieces[dim], length // pieces[dim]] if dim in pieces else [length]
    placements: list[Placement] = []
    for p in shown:
        if isinstance(p, _StridedShard):
            p = Shard(first[p.dim] + 1)
        elif isinstance(p, Shard):
            p = Shard(first[p.dim])
        placements.append(p)
    return placements, whole


def full_order(groups: Iterable[Sequence[int]], ndim: int) -> tuple[int, ...]:
    """The mesh dims of `groups`, each of which cuts one tensor dim, and the others."""
    cutting = [m for group in groups for m in group]
    return (*cutting, *(m for m in range(ndim) if m not in cutting))


__all__ = ["full_order", "is_packed", "unpacked", "with_order", "without_order"]
