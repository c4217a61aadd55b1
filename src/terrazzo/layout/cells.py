"""Which ranks hold which part of a tensor, without looking at every rank.

A layout cuts its tensor into cells: the boxes that its ranks hold. Along one tensor dim the cells that intersect an
interval are neighbours, and the chunks of one cut have at most three different lengths. So planning an exchange costs
as much as this rank exchanges, and planning that depends on shapes alone costs the same for 8 ranks as for thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_runs, chunk_span, chunks_between
from terrazzo.layout.layout import Layout
from terrazzo.layout.placement import Shard


def cells_in(layout: Layout, box: Box) -> Iterator[tuple[int, Box]]:
    """The cells of `layout` that have elements in `box`, which lies within the tensor.

    For each: the row-major index in the mesh of the first rank that holds it, and the part of the cell that lies in
    `box`, relative to `box`. `replicas` gives the other ranks that hold the cell.
    """
    if box.is_empty:
        return
    strides = mesh_strides(layout.mesh_shape)
    along = [
        _parts_between(layout, d, start, start + length, strides)
        for d, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True))
    ]
    if not along:
        yield 0, box
    else:
        for parts in product(*along):
            indices, offsets, lengths = zip(*parts, strict=True)
            yield sum(indices), Box(offsets, lengths)


def _parts_between(
    layout: Layout, dim: int, start: int, stop: int, strides: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The parts of `dim` that have elements from `start` to `stop`, each as (index, offset, length).

    `index` is the sum of the strides times the coordinates on the mesh dims that cut `dim`; `offset`, counted from
    `start`, and `length` are those of the elements in common.
    """
    parts = [(0, 0, layout.shape[dim])]
    for m in layout.shard_order(dim):
        n, stride = layout.mesh_shape[m], strides[m]
        inner: list[tuple[int, int, int]] = []
        for index, offset, length in parts:
            for i in chunks_between(length, n, max(0, start - offset), min(length, stop - offset)):
                own_offset, own_length = chunk_span(length, n, i)
                inner.append((index + i * stride, offset + own_offset, own_length))
        parts = inner
    return [
        (index, max(offset, start) - start, min(offset + length, stop) - max(offset, start))
        for index, offset, length in parts
    ]


def mesh_strides(mesh_shape: Sequence[int]) -> list[int]:
    """The row-major strides of a mesh: by how much a rank's index grows per step along each mesh dim."""
    return [prod(mesh_shape[m + 1 :]) for m in range(len(mesh_shape))]


def replicas(layout: Layout, mesh_dims: Iterable[int] | None = None) -> list[int]:
    """The ranks that hold the same cell, as differences from the index of the first of them; in order, from 0.

    With `mesh_dims`, only the ranks whose coordinates differ on these.
    """
    strides = mesh_strides(layout.mesh_shape)
    offsets = [0]
    for m in range(len(layout.mesh_shape)) if mesh_dims is None else sorted(mesh_dims):
        if not isinstance(layout.placements[m], Shard):
            offsets = [o + i * strides[m] for o in offsets for i in range(layout.mesh_shape[m])]
    return offsets


def first_holders(layout: Layout) -> list[int]:
    """For each rank of the mesh, in row-major order, the index of the first rank that holds the same cell."""
    firsts = [0]
    for m, (n, stride) in enumerate(zip(layout.mesh_shape, mesh_strides(layout.mesh_shape), strict=True)):
        step = stride if isinstance(layout.placements[m], Shard) else 0
        firsts = [first + i * step for first in firsts for i in range(n)]
    return firsts


def leaves_a_rank_empty(layout: Layout) -> bool:
    """Whether some rank's shard is empty although the tensor has elements."""
    if 0 in layout.shape:
        return False
    return any(0 in _lengths(layout, d, None) for d in range(layout.ndim))


def coordinates_of_all_shapes(layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    """A few mesh coordinates whose local shapes under these layouts are all the local shapes that any rank has.

    The layouts are on one mesh. A check of every local shape then needs these coordinates only.
    """
    firsts: list[set[int]] = [{0} for _ in layouts[0].mesh_shape]
    for layout in layouts:
        for d in range(layout.ndim):
            _lengths(layout, d, firsts)
    return list(product(*[sorted(each) for each in firsts]))


def _lengths(layout: Layout, dim: int, firsts: list[set[int]] | None) -> set[int]:
    """The lengths of `dim` on all ranks; adds to `firsts`, per mesh dim, the coordinates where the length changes."""
    lengths = {layout.shape[dim]}
    for m in layout.shard_order(dim):
        runs = [run for length in lengths for run in chunk_runs(length, layout.mesh_shape[m])]
        if firsts is not None:
            firsts[m].update(first for first, _ in runs)
        lengths = {length for _, length in runs}
    return lengths
