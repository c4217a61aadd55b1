"""The steps that take a tensor from one layout to another, as data.

`plan_transition(src, dst)` returns the steps that turn this rank's part under `src` into its part under `dst`, for two
layouts of one tensor on one mesh. The order of the steps keeps the communicated bytes few: steps that shrink the data
without communication come first, gathers come last.

    replicate -> shard      slice                       nothing moves
    replicate -> partial    keep on the first rank      nothing moves
    partial   -> shard      reduce-scatter
    shard     -> shard      all-to-all; several of them, or a change of shard order, in one exchange
    partial   -> replicate  all-reduce, neighbouring mesh dims at once
    shard     -> replicate  all-gather, neighbouring mesh dims at once

A mesh dim that newly shards a tensor dim always cuts inside those that shard it already; where `dst` wants another
nesting, one exchange at the end (or before a gather) moves the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from terrazzo.errors import LayoutError
from terrazzo.layout.box import Box
from terrazzo.layout.cells import cells_in, mesh_strides, replicas
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.layout.layout import Layout
from terrazzo.layout.placement import Partial, Placement, Replicate, Shard, _StridedShard

_R = Replicate()


class _Step:
    """What all steps have in common: the mesh dims whose ranks take part come first."""

    __slots__: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All else, in order."""
        return tuple([getattr(self, name) for name in self.__slots__[1:]])


@dataclass(frozen=True, slots=True)
class Slice(_Step):
    """Keep this rank's chunk of `dim`; `sizes` are the chunks of all ranks of `mesh_dim`."""

    mesh_dims: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather(_Step):
    """Concatenate along `dim` the chunks of the ranks of `mesh_dims` (outermost first)."""

    mesh_dims: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllReduce(_Step):
    """Reduce the terms of all ranks of `mesh_dims`; every rank receives the result."""

    mesh_dims: tuple[int, ...]
    op: str


@dataclass(frozen=True, slots=True)
class ReduceScatter(_Step):
    """Reduce the terms of all ranks of `mesh_dims`; each rank receives its chunk of `dim`."""

    mesh_dims: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    op: str


@dataclass(frozen=True, slots=True)
class AllToAll(_Step):
    """Send chunks of `split_dim`, receive chunks of `concat_dim`."""

    mesh_dims: tuple[int, ...]
    split_dim: int
    split_sizes: tuple[int, ...]
    concat_dim: int
    concat_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToPartial(_Step):
    """Turn equal copies into terms of a reduction: the first rank keeps the value, the others the neutral element."""

    mesh_dims: tuple[int, ...]
    op: str


@dataclass(frozen=True, slots=True)
class Exchange(_Step):
    """Cut the local part into `send` boxes, one per rank of `mesh_dims`; build the new part from `receive` boxes.

    Boxes are relative to the old and to the new local part; None means that the two ranks exchange nothing.
    """

    mesh_dims: tuple[int, ...]
    send: tuple[Box | None, ...]
    receive: tuple[Box | None, ...]
    shape: tuple[int, ...]


LOCAL_STEPS = (Slice, ToPartial)
"""Steps that need no communication."""

Step: TypeAlias = Slice | Gather | AllReduce | ReduceScatter | AllToAll | ToPartial | Exchange


@functools.lru_cache(maxsize=4096)
def plan_transition(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The steps from `src` to `dst`; empty when they are the same."""
    if src is dst:
        return ()
    if src.mesh != dst.mesh or src.shape != dst.shape:
        raise LayoutError(f"a transition keeps mesh and shape: {src} -> {dst}")
    if src.packed or dst.packed:
        raise LayoutError(f"packed layouts have no boxes to plan with: unpack them first ({src} -> {dst})")
    if src.coord is None:
        return ()
    return _Planner(src, dst).run()


def moved_bytes(src: Layout, dst: Layout, itemsize: int) -> int:
    """An upper bound on the bytes that one rank receives from `src` to `dst`; policies and planners compare it."""
    numel = prod(src.shape)
    if src.coord is None or numel == 0:
        return 0
    if src.packed or dst.packed:
        return sum(moved_bytes(a, b, itemsize) for a, b in unpacked_steps(src, dst))
    total, held = 0.0, numel / prod(src.mesh_shape[m] for m, p in enumerate(src.placements) if isinstance(p, Shard))
    for step in plan_transition(src, dst):
        n = prod(src.mesh_shape[m] for m in step.mesh_dims)
        if isinstance(step, Slice):
            held /= n
        elif isinstance(step, Gather):
            total, held = total + held * (n - 1), held * n
        elif isinstance(step, AllReduce):
            total += 2 * held * (n - 1) / n
        elif isinstance(step, ReduceScatter):
            total, held = total + held * (n - 1) / n, held / n
        elif isinstance(step, (AllToAll, Exchange)):
            total += held * (n - 1) / n
    return int(total * itemsize)


def unpacked_steps(src: Layout, dst: Layout) -> list[tuple[Layout, Layout]]:
    """The transitions from `src` to `dst` if one of them is packed: each of two layouts that are not.

    Seen with the pieces of `src`, as much as possible becomes what `dst` has; the rest is replicated between, and cut
    as `dst` cuts its own pieces.
    """
    between = src.with_placements(
        [
            b if a is b or not (isinstance(b, _StridedShard) or (isinstance(b, Shard) and b.dim in src.packed)) else _R
            for a, b in zip(src.placements, dst.placements, strict=True)
        ],
        dst.order,
    )
    return [(a.unpacked(by), b.unpacked(by)) for a, b, by in ((src, between, src.packed), (between, dst, dst.packed))]


class _Planner:
    """Goes from the source placements to the target's, one step at a time."""

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.src, self.dst = src, dst
        self.at: list[Placement] = list(src.placements)
        self.nesting: list[int] = [m for m in src.order if isinstance(src.placements[m], Shard)]
        self.steps: list[Step] = []

    def run(self) -> tuple[Step, ...]:
        self._resolve_mixed_partials()
        self._slices()
        self._reduce_scatters()
        self._move_shards()
        self._all_reduces()
        self._gathers()
        self._to_partials()
        self._fix_nesting()
        return tuple(self.steps)

    # --- what each mesh dim still has to do

    def _pending(self, kind: type, target: type) -> list[int]:
        goal = self.dst.placements
        return [
            m for m, p in enumerate(self.at) if isinstance(p, kind) and p is not goal[m] and isinstance(goal[m], target)
        ]

    def _length(self, dim: int, outside: int | None = None) -> int:
        """This rank's current length of `dim`, without the cut by mesh dim `outside` (which must be innermost)."""
        length = self.src.shape[dim]
        coord = self.src.coord
        assert coord is not None
        for m in self.nesting:
            if self.at[m].is_shard(dim) and m != outside:
                length = chunk_sizes(length, self.src.mesh_shape[m])[coord[m]]
        return length

    def _sizes(self, m: int, dim: int) -> tuple[int, ...]:
        return chunk_sizes(self._length(dim, outside=m), self.src.mesh_shape[m])

    def _is_innermost(self, m: int) -> bool:
        placement = self.at[m]
        assert isinstance(placement, Shard)
        return [k for k in self.nesting if self.at[k].is_shard(placement.dim)][-1] == m

    def _place(self, m: int, placement: Placement) -> None:
        if m in self.nesting:
            self.nesting.remove(m)
        self.at[m] = placement
        if isinstance(placement, Shard):
            self.nesting.append(m)

    # --- the phases

    def _resolve_mixed_partials(self) -> None:
        """Terms of different reductions do not commute: reduce them from the last mesh dim to the first.

        A tensor's terms are reduced along the last mesh dim first. So before a mesh dim gets other terms, or none, the
        terms of all later mesh dims are reduced; `_to_partials` makes new ones where `dst` has terms, too.
        """
        goal = self.dst.placements
        pairs = list(zip(self.at, goal, strict=True))
        changing = [m for m, (p, q) in enumerate(pairs) if p is not q and (p.is_partial() or q.is_partial())]
        if not changing:
            return
        later = range(changing[0], len(self.at))
        ops = {p.reduce_op for m in later for p in pairs[m] if isinstance(p, Partial)}
        commute = len(ops) == 1 or ops <= {"sum", "avg"}
        for m in reversed(later):
            p = self.at[m]
            if isinstance(p, Partial) and (not commute or (m in changing and goal[m].is_partial())):
                self.steps.append(AllReduce((m,), p.reduce_op))
                self._place(m, _R)

    def _slices(self) -> None:
        for m in self._pending(Replicate, Shard):
            self._shard(m, lambda m, dim, sizes: Slice((m,), dim, sizes))

    def _reduce_scatters(self) -> None:
        for m in self._pending(Partial, Shard):
            placement = self.at[m]
            assert isinstance(placement, Partial)
            self._shard(m, functools.partial(_reduce_scatter, op=placement.reduce_op))

    def _shard(self, m: int, make: Callable[[int, int, tuple[int, ...]], Step]) -> None:
        target = self.dst.placements[m]
        assert isinstance(target, Shard)
        self.steps.append(make(m, target.dim, self._sizes(m, target.dim)))
        self._place(m, target)

    def _move_shards(self) -> None:
        moving = self._pending(Shard, Shard)
        if len(moving) == 1 and self._is_innermost(moving[0]):
            (m,) = moving
            old, new = self.at[m], self.dst.placements[m]
            assert isinstance(old, Shard) and isinstance(new, Shard)
            concat_sizes, split_sizes = self._sizes(m, old.dim), self._sizes(m, new.dim)
            self.steps.append(AllToAll((m,), new.dim, split_sizes, old.dim, concat_sizes))
            self._place(m, new)
        elif moving:
            goal = [self.dst.placements[m] if m in moving else p for m, p in enumerate(self.at)]
            settled = [m for m in self.nesting if m not in moving]
            self._exchange(goal, self._wanted_nesting(goal, settled + moving))

    def _all_reduces(self) -> None:
        for dims in self._runs(self._pending(Partial, Replicate)):
            placement = self.at[dims[0]]
            assert isinstance(placement, Partial)
            self.steps.append(AllReduce(dims, placement.reduce_op))
            for m in dims:
                self._place(m, _R)

    def _runs(self, dims: list[int]) -> list[tuple[int, ...]]:
        """Groups of mesh dims that hold the same placement and can be served by one collective."""
        groups: dict[Placement, list[int]] = {}
        for m in dims:
            groups.setdefault(self.at[m], []).append(m)
        return [tuple(g) for g in groups.values()]

    def _gathers(self) -> None:
        leaving = self._pending(Shard, Replicate) + self._pending(Shard, Partial)
        by_dim: dict[int, list[int]] = {}
        for m in self.nesting:
            placement = self.at[m]
            if m in leaving and isinstance(placement, Shard):
                by_dim.setdefault(placement.dim, []).append(m)
        blocked = [
            m
            for dim, ms in by_dim.items()
            for m in ms
            if [k for k in self.nesting if self.at[k].is_shard(dim)][-len(ms) :] != ms
        ]
        if blocked:
            staying = [m for m in self.nesting if m not in leaving]
            self._exchange(list(self.at), staying + [m for m in self.nesting if m in leaving])
        for dim, ms in by_dim.items():
            length = self._length_outside(dim, ms)
            self.steps.append(Gather(tuple(ms), dim, self.src.part_sizes(ms, dim, length)))
            for m in ms:
                self._place(m, _R)

    def _length_outside(self, dim: int, inner: list[int]) -> int:
        length = self.src.shape[dim]
        coord = self.src.coord
        assert coord is not None
        for m in self.nesting:
            if self.at[m].is_shard(dim) and m not in inner:
                length = chunk_sizes(length, self.src.mesh_shape[m])[coord[m]]
        return length

    def _to_partials(self) -> None:
        groups: list[tuple[Partial, list[int]]] = []  # in the order of mesh dims, which is that of the reductions
        for m in self._pending(Replicate, Partial):
            target = self.dst.placements[m]
            assert isinstance(target, Partial)
            if not groups or groups[-1][0] is not target:
                groups.append((target, []))
            groups[-1][1].append(m)
        for target, ms in groups:
            self.steps.append(ToPartial(tuple(ms), target.reduce_op))
            for m in ms:
                self._place(m, target)

    def _fix_nesting(self) -> None:
        self._exchange(list(self.at), [m for m in self.dst.order if isinstance(self.at[m], Shard)])

    # --- the general exchange

    def _wanted_nesting(self, goal: list[Placement], candidates: list[int]) -> list[int]:
        """The target's nesting where it is known already, so that no second exchange is needed."""
        final = [m for m in self.dst.order if m in candidates]
        return final if all(goal[m] is self.dst.placements[m] for m in candidates) else candidates

    def _exchange(self, goal: list[Placement], nesting: list[int]) -> None:
        """Move pieces so that the shards become `goal`, nested as `nesting`; nothing if they are so already."""
        src = self.src
        now = Layout.of(src.mesh, _shards_only(self.at), src.shape, _full_order(self.nesting, len(self.at)))
        then = Layout.of(src.mesh, _shards_only(goal), src.shape, _full_order(nesting, len(self.at)))
        if now is not then:
            dims = tuple(m for m in range(len(self.at)) if self._differs(now, then, m))
            self.steps.append(_exchange_step(now, then, dims))
        self.at, self.nesting = goal, list(nesting)

    @staticmethod
    def _differs(now: Layout, then: Layout, m: int) -> bool:
        a, b = now.placements[m], then.placements[m]
        if a is not b:
            return True
        return isinstance(a, Shard) and now.shard_order(a.dim) != then.shard_order(a.dim)


def _reduce_scatter(m: int, dim: int, sizes: tuple[int, ...], *, op: str) -> ReduceScatter:
    return ReduceScatter((m,), dim, sizes, op)


def _shards_only(placements: list[Placement]) -> list[Placement]:
    return [p if isinstance(p, Shard) else _R for p in placements]


def _full_order(nesting: list[int], ndim: int) -> tuple[int, ...]:
    return (*nesting, *(m for m in range(ndim) if m not in nesting))


def _exchange_step(now: Layout, then: Layout, dims: tuple[int, ...]) -> Exchange:
    me = now.coord
    assert me is not None
    old, new = now.box(me), then.box(me)
    return Exchange(dims, _by_peer(old, then, me, dims), _by_peer(new, now, me, dims), tuple(new.lengths))


def _by_peer(mine: Box, layout: Layout, me: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Box | None, ...]:
    """What each rank holds of `mine`, relative to it, under `layout`; for ranks that differ from `me` only on `dims`.

    The first of `dims` is the outermost.
    """
    strides = mesh_strides(layout.mesh_shape)
    line = [sum(i * stride for m, (i, stride) in enumerate(zip(me, strides, strict=True)) if m not in dims)]
    for m in dims:
        line = [index + i * strides[m] for index in line for i in range(layout.mesh_shape[m])]
    place = {index: position for position, index in enumerate(line)}
    result: list[Box | None] = [None] * len(line)
    copies = replicas(layout, dims)
    beside = sum(
        me[m] * strides[m] for m, p in enumerate(layout.placements) if m not in dims and not isinstance(p, Shard)
    )
    for first, part in cells_in(layout, mine):
        for copy in copies:
            position = place.get(first + beside + copy)
            if position is not None:
                result[position] = part
    return tuple(result)
