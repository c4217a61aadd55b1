"""From a rule's `Spec` and the operands' layouts to a `CallPlan`: which layouts operands are redistributed to.

Each mesh dim chooses among its candidates (see `candidates`), given the choices of the mesh dims before it. The
cheapest wins (see `costs`). The choice depends on global shapes and placements only, so every rank makes the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.layout import Layout, Replicate
from terrazzo.layout.placement import CUTS, _StridedShard
from terrazzo.tensor.dispatch.candidates import Candidate, Cost, Sizes, candidates_of
from terrazzo.tensor.dispatch.spec import Call, Chosen, Joined, LocalFunction, Spec
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, put_at

_R = Replicate()


@dataclass(frozen=True, slots=True)
class OperandPlan:
    """What happens to one operand before the local function runs.

    `cast` names the mesh dims on which a replicated value enters a computation that differs between ranks: there its
    gradient is summed (identity in forward, all-reduce in backward).
    """

    path: tuple[Any, ...]
    src: Layout
    dst: Layout
    cast: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A planned call: operands to redistribute and cast, the local function, the outputs' layouts."""

    operands: tuple[OperandPlan, ...]
    outs: tuple[Layout, ...]
    varying: tuple[int, ...]
    local: LocalFunction | None
    copies_view: bool
    joined: Joined | None = None

    @property
    def joined_outs(self) -> tuple[Layout, ...]:
        """The outputs' layouts when `joined` runs: replicated where the plan says Partial."""
        return tuple(out.dual for out in self.outs)

    @property
    def moves(self) -> bool:
        return any(o.src is not o.dst for o in self.operands)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one mesh dim chose, and among which candidates; `best` is None if there are none."""

    mesh_dim: int
    options: tuple[tuple[Candidate, Cost], ...]
    best: Candidate | None


def choices(spec: Spec, layouts: Sequence[Layout], fixed_output: Layout | None = None) -> Iterator[Choice]:
    """The choice of each mesh dim, in order; ends after a mesh dim without candidates."""
    mesh_shape = layouts[0].mesh_shape
    sharded: dict[int, list[int]] = {}
    in_pieces: set[int] = set()
    sizes = Sizes(spec, layouts)
    for m, n in enumerate(mesh_shape):
        want = None if fixed_output is None else fixed_output.placements[m]
        options = tuple(
            (candidate, sizes.cost(candidate, m, n))
            for candidate in candidates_of(spec, layouts, m, mesh_shape, sharded, in_pieces, want)
            if want is None or not candidate.outs or candidate.outs[0] is want
        )
        best = min(options, key=functools.partial(_order, spec))[0] if options else None
        yield Choice(m, options, best)
        if best is None:
            return
        sizes.chosen.append(best)
        if best.factor is not None:
            sharded.setdefault(best.factor, []).append(m)
            if any(isinstance(p, _StridedShard) for p in (*best.ins, *best.outs)):
                in_pieces.add(best.factor)


def _order(spec: Spec, option: tuple[Candidate, Cost]) -> tuple[float, float, int]:
    candidate, cost = option
    # A user's rule (`acceptable`) lists its preferred placements first.
    return cost.total, 0.0 if spec.acceptable else cost.left, candidate.rank


def make_plan(call: Call, spec: Spec, fixed_output: Layout | None = None, to_run: bool = True) -> CallPlan | None:
    """The cheapest plan, or None when no plan gives `fixed_output` (for in-place operations: self's layout).

    With `to_run=False` it has no functions for the local tensors: making them may make process groups, for which all
    ranks have to call this.
    """
    layouts = [o.layout for o in call.operands]
    mesh, ndim = layouts[0].mesh, len(layouts[0].mesh_shape)
    chosen: list[Candidate] = []
    sharded: dict[int, list[int]] = {}
    for choice in choices(spec, layouts, fixed_output):
        if choice.best is None:
            return None
        chosen.append(choice.best)
        if choice.best.factor is not None:
            sharded.setdefault(choice.best.factor, []).append(choice.mesh_dim)
    order = next((layout.order for layout in layouts if layout.order != tuple(range(ndim))), None)
    if order is not None:
        sharded = {f: sorted(ms, key=order.index) for f, ms in sharded.items()}
    ins = tuple(
        layout if i in spec.unread else Layout.of(mesh, [c.ins[i] for c in chosen], layout.shape, order)
        for i, layout in enumerate(layouts)
    )
    outs = tuple(Layout.of(mesh, [c.outs[i] for c in chosen], shape, order) for i, shape in enumerate(spec.shapes))
    if fixed_output is not None and outs[0] is not fixed_output:
        return None
    varying = tuple(m for m, c in enumerate(chosen) if any(p is not _R for p in (*c.ins, *c.outs)))
    operands = tuple(
        OperandPlan(o.path, src, dst, () if i in spec.unread else _cast_dims(src, dst, varying))
        for i, (o, src, dst) in enumerate(zip(call.operands, layouts, ins, strict=True))
    )
    decided = Chosen(ins, outs, {f: tuple(ms) for f, ms in sharded.items()})
    moved = any(src is not dst for src, dst in zip(layouts, ins, strict=True))
    copies_view = bool(spec.is_view) and moved
    if not to_run:
        return CallPlan(operands, outs, varying, None, copies_view)
    outside = layouts[0].coord is None  # such a rank runs nothing, and has no axes to communicate on
    local = None if spec.localize is None or outside else spec.localize(decided)
    if spec.never_empty and not outside:
        local = _with_a_row(decided, local, [o.path for o in operands])
    has_terms = any(out.dual is not out for out in outs)
    joined = spec.joined(decided) if spec.joined is not None and has_terms else None
    return CallPlan(operands, outs, varying, local, copies_view, joined)


def _with_a_row(chosen: Chosen, local: LocalFunction | None, paths: Sequence[tuple[Any, ...]]) -> LocalFunction | None:
    """`local` where this rank's part of an operand is empty: with one row of zeros along the dims that it lacks.

    So the results have the right dtypes, and backward, to any order, runs as on the ranks that hold something.
    """
    lacking = [(path, _lacking(layout)) for path, layout in zip(paths, chosen.ins, strict=True)]
    if not any(dims for _, dims in lacking):
        return local

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        loc, kw = list(loc), dict(kw)
        for path, dims in lacking:
            given: torch.Tensor = get_at(loc, kw, path)
            rows = [n for d in reversed(range(given.ndim)) for n in (0, int(d in dims))]
            put_at(loc, kw, path, torch.constant_pad_nd(given, rows) if dims else given)
        result = func(*loc, **kw) if local is None else local(func, loc, kw)
        outs = iter(chosen.outs)

        def without_the_row(made: torch.Tensor) -> torch.Tensor:
            dims = _lacking(next(outs))
            for d in dims:
                made = made.narrow(d, 0, 0)
            return made.clone() if dims else made  # not a view: on the other ranks it is none

        return map_tensors(result, without_the_row)

    return run


def _lacking(layout: Layout) -> list[int]:
    """The dims of which this rank holds no row although there are some."""
    return [d for d, (mine, n) in enumerate(zip(layout.local_shape, layout.shape, strict=True)) if n and not mine]


def _cast_dims(src: Layout, dst: Layout, varying: tuple[int, ...]) -> tuple[int, ...]:
    # The gradient of a gather for a varying computation is reduce-scattered, so it needs no cast.
    return tuple(m for m in varying if dst.placements[m] is _R and not isinstance(src.placements[m], CUTS))
