"""A layout: a global shape, a mesh, and one placement per mesh dimension.

A `Layout` is immutable and interned, so that plans can be keyed by identity. Nothing here communicates: the mesh is
only asked for its shape and for this rank's coordinate. When several mesh dimensions shard one tensor dimension,
`order` says which of them cuts first; the default is the order of the mesh dims, as in PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from terrazzo.errors import LayoutError, PlacementsError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_sizes, chunk_span
from terrazzo.layout.drawing import caption_of, grid_html
from terrazzo.layout.grid import Grid, grid_of
from terrazzo.layout.order import is_packed, unpacked, with_order, without_order
from terrazzo.layout.placement import CUTS, Partial, Placement, Replicate, Shard, _StridedShard, check_placement


class MeshLike(Protocol):
    """The part of `DeviceMesh` that a layout needs."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Any: ...


_pool: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()
_lock = threading.Lock()


class Layout:
    """An interned description of a distributed tensor; make one with `Layout.of`.

    Computed once and kept: `local_shape` (on this rank), `dual` (the layout of a gradient), `varying` (the mesh dims on
    which ranks hold different values), and `shown` (the placements with the order written into them, as users see
    them: two layouts of one mesh and shape that show the same placements give every rank the same part), and `packed`
    (the tensor dims of which a mesh dim cuts several pieces, with their number; see `order`).
    """

    __slots__ = (
        "mesh",
        "placements",
        "shape",
        "order",
        "ndim",
        "mesh_shape",
        "coord",
        "local_shape",
        "varying",
        "dual",
        "is_replicated",
        "packed",
        "shown",
        "__weakref__",
    )
    mesh: Any
    placements: tuple[Placement, ...]
    shape: torch.Size
    order: tuple[int, ...]
    ndim: int
    mesh_shape: tuple[int, ...]
    coord: tuple[int, ...] | None
    local_shape: torch.Size
    varying: tuple[int, ...]
    dual: Layout
    is_replicated: bool
    packed: Mapping[int, int]
    shown: tuple[Placement, ...]

    @staticmethod
    def of(
        mesh: Any, placements: Iterable[Placement], shape: Sequence[int], order: Sequence[int] | None = None
    ) -> Layout:
        """The layout of a tensor of `shape`, one placement per dimension of `mesh`.

        Placements with a `_StridedShard` say the order themselves; `order` is not used then. One that says no order
        cuts pieces of its dim.
        """
        placements, shape = tuple(placements), tuple(shape)
        natural = tuple(range(len(placements)))
        order = natural if order is None else _canonical_order(tuple(order), placements, natural)
        # A layout keeps its mesh alive, so no other mesh can get this id while the entry is there.
        key = (id(mesh), placements, shape, order)
        found = _pool.get(key)
        if found is None:
            checked = _checked(mesh, placements, shape)
            if any(isinstance(p, _StridedShard) for p in checked) and not is_packed(checked, mesh.shape, shape):
                checked, order = without_order(checked, tuple(mesh.shape))
            if checked != placements:
                return Layout.of(mesh, checked, shape, order)
            built = _build(mesh, placements, shape, order)
            with _lock:
                found = _pool.get(key)
                if found is None:
                    _pool[key] = found = built
        return found

    def with_placements(self, placements: Iterable[Placement], order: Sequence[int] | None = None) -> Layout:
        """The layout with other placements, of the same tensor on the same mesh."""
        return Layout.of(self.mesh, placements, self.shape, order)

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """The layout with another shape, and the same placements."""
        return Layout.of(self.mesh, self.placements, shape, self.order)

    def shard_order(self, dim: int) -> tuple[int, ...]:
        """The mesh dims that cut tensor dimension `dim`, outermost first."""
        return tuple(m for m in self.order if self.placements[m].is_shard(dim))

    def unpacked(self, pieces: Mapping[int, int]) -> Layout:
        """The layout where each dim of `pieces` is seen as two: so many pieces, and the elements of a piece."""
        if not pieces:
            return self
        placements, shape = unpacked(self.placements, self.shape, pieces)
        return Layout.of(self.mesh, placements, shape, self.order)

    def lengths(self, coord: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of the part held at `coord` (this rank's by default)."""
        if not self.packed:
            return self.box(coord).lengths
        found = list(self.unpacked(self.packed).box(coord).lengths)
        for dim in sorted(self.packed):
            found[dim] *= found.pop(dim + 1)
        return tuple(found)

    def box(self, coord: Sequence[int] | None = None) -> Box:
        """The part of the global tensor held at `coord` (this rank's by default)."""
        if self.packed:
            raise LayoutError(
                f"what a rank holds under {list(self.placements)} is {max(self.packed.values())} parts of the tensor, "
                "not one box: redistribute the tensor to Shard or Replicate first"
            )
        at = self.coord if coord is None else coord
        if at is None:
            return Box((0,) * self.ndim, (0,) * self.ndim)
        offsets, lengths = [0] * self.ndim, list(self.shape)
        for m in self.order:
            placement = self.placements[m]
            if isinstance(placement, Shard):
                d = placement.dim
                offset, lengths[d] = chunk_span(lengths[d], self.mesh_shape[m], at[m])
                offsets[d] += offset
        return Box(tuple(offsets), tuple(lengths))

    def pieces(self, coord: Sequence[int] | None = None) -> list[Box]:
        """The boxes held at `coord` (this rank's by default): one, or one of each piece of packed dims."""
        if not self.packed:
            return [self.box(coord)]
        dims = sorted(self.packed)
        box = self.unpacked(self.packed).box(coord)
        offsets, lengths = list(box.offsets), list(box.lengths)
        for dim in dims:
            offsets[dim], lengths[dim] = offsets.pop(dim + 1), lengths.pop(dim + 1)
        found = []
        for numbers in product(*(range(self.packed[dim]) for dim in dims)):
            own = offsets.copy()
            for dim, number in zip(dims, numbers, strict=True):
                own[dim] += number * (self.shape[dim] // self.packed[dim])
            found.append(Box(tuple(own), tuple(lengths)))
        return found

    def part_sizes(self, mesh_dims: Sequence[int], dim: int, length: int | None = None) -> tuple[int, ...]:
        """Lengths along `dim` of the ranks of `mesh_dims` (outermost first) when only these mesh dims cut `length`."""
        sizes: tuple[int, ...] = (self.shape[dim] if length is None else length,)
        for m in mesh_dims:
            sizes = tuple(part for whole in sizes for part in chunk_sizes(whole, self.mesh_shape[m]))
        return sizes

    def boxes(self, ranks: Sequence[int] | None = None) -> dict[int, Box]:
        """The box of each rank: by position in the mesh, or by the numbers that `ranks` gives to the positions."""
        coordinates = list(product(*(range(n) for n in self.mesh_shape)))
        numbers = range(len(coordinates)) if ranks is None else ranks
        return {number: self.box(coord) for number, coord in zip(numbers, coordinates, strict=True)}

    def grid(self, ranks: Sequence[int] | None = None) -> Grid:
        """The cells that it cuts the tensor into, and who holds each, numbered as `boxes` numbers them."""
        found = grid_of(tuple(self.shape), self.boxes(ranks))
        assert found is not None, "a layout cuts its tensor into a grid"
        return found

    def html(self, ranks: Sequence[int] | None = None, header: str = "", device: str = "") -> str:
        """Who holds what, as a table for a notebook."""
        idle = [number for number, box in self.boxes(ranks).items() if box.is_empty]
        names = getattr(self.mesh, "mesh_dim_names", None)
        caption = caption_of(self.shape, self.mesh_shape, names, self.placements, idle)
        return grid_html(self.grid(ranks), header=header, caption=caption, device=device)

    def _repr_html_(self) -> str:
        return self.html(header="positions in the mesh")

    def __repr__(self) -> str:
        marks = ", ".join(str(p) for p in self.placements)
        order = "" if self.order == tuple(range(len(self.order))) else f", order={list(self.order)}"
        return f"Layout([{marks}] of {list(self.shape)} on {list(self.mesh_shape)}{order})"

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Layout.of, (self.mesh, self.placements, tuple(self.shape), self.order))


def _allowed_dims(ndim: int) -> str:
    return f"dim must be from {-ndim} to {ndim - 1}" if ndim else "a tensor without dims cannot be sharded"


def _canonical_order(
    order: tuple[int, ...], placements: tuple[Placement, ...], natural: tuple[int, ...]
) -> tuple[int, ...]:
    """`order` with everything but the relative order of mesh dims that cut one tensor dim made ascending."""
    if sorted(order) != list(natural):
        raise LayoutError(f"order must be a permutation of the mesh dims {list(natural)}, got {list(order)}")
    by_dim: dict[int, list[int]] = {}
    for m in order:
        placement = placements[m]
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(m)
    if all(ms == sorted(ms) for ms in by_dim.values()):
        return natural
    result = list(natural)
    for ms in by_dim.values():
        for slot, m in zip(sorted(ms), ms, strict=True):
            result[slot] = m
    return tuple(result)


def _checked(mesh: Any, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    if len(placements) != len(mesh.shape):
        raise PlacementsError(
            f"{len(placements)} placements {list(placements)} for a mesh of shape {tuple(mesh.shape)}: the list must "
            f"have the same length as the mesh's shape, {len(mesh.shape)}: one for each of its dims"
        )
    result: list[Placement] = []
    for p in placements:
        check_placement(p)
        if isinstance(p, CUTS):
            dim = p.dim + len(shape) if p.dim < 0 else p.dim
            if not 0 <= dim < len(shape):
                given = f"Shard(dim={p.dim}) does not exist in a tensor of shape {tuple(shape)}"
                raise PlacementsError(f"{given}: {_allowed_dims(len(shape))}")
            p = Shard(dim) if isinstance(p, Shard) else _StridedShard(dim, split_factor=p.split_factor)
        result.append(p)
    return tuple(result)


_REPLICATE = Replicate()


def _build(mesh: Any, placements: tuple[Placement, ...], shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    built = object.__new__(Layout)
    coord = mesh.get_coordinate()
    built.packed = {p.dim: p.split_factor for p in placements if isinstance(p, _StridedShard)}
    built.mesh, built.placements, built.order = mesh, placements, order
    built.shape, built.ndim = torch.Size(shape), len(shape)
    built.mesh_shape = tuple(mesh.shape)
    built.coord = None if coord is None else tuple(coord)
    if coord is None:  # a rank outside the mesh: no elements, or the neutral value for a 0-d tensor
        built.local_shape = torch.Size((0,) if shape else ())
    else:
        built.local_shape = torch.Size(built.lengths())
    built.varying = tuple(m for m, p in enumerate(placements) if p is not _REPLICATE)
    built.is_replicated = not built.varying
    natural = order == tuple(range(len(order)))
    built.shown = placements if natural else with_order(placements, built.mesh_shape, order)
    if any(isinstance(p, Partial) for p in placements):
        built.dual = Layout.of(mesh, [_REPLICATE if isinstance(p, Partial) else p for p in placements], shape, order)
    else:
        built.dual = built
    return built
