"""From a rule's `Spec` and the operands' layouts to a `CallPlan`: which layouts the operands are brought to.

Each mesh dim chooses for itself: shard one of the factors that some operand is already sharded on, let terms pass
where the function is linear, or replicate.  The choice with the fewest bytes wins; among equals the one that
computes least. Everything is decided from global shapes and placements, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.dispatch.spec import Call, Chosen, Joined, LocalFunction, Spec

_R = Replicate()


@dataclass(frozen=True, slots=True)
class OperandPlan:
    """What happens to one operand before the local function runs.

    `cast` names the mesh dims on which a replicated value meets a computation that differs between ranks: there its
    gradient is summed (identity forward, all-reduce backward).
    """

    path: tuple[Any, ...]
    src: Layout
    dst: Layout
    cast: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A decided call: operands to move and to cast, the function for the locals, the outputs' layouts."""

    operands: tuple[OperandPlan, ...]
    outs: tuple[Layout, ...]
    varying: tuple[int, ...]
    local: LocalFunction | None
    copies_view: bool
    joined: Joined | None = None

    @property
    def joined_outs(self) -> tuple[Layout, ...]:
        """The outputs' layouts when `joined` runs."""
        return tuple(out.dual for out in self.outs)

    @property
    def moves(self) -> bool:
        return any(o.src is not o.dst for o in self.operands)


@dataclass(frozen=True, slots=True)
class _Candidate:
    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    factor: int | None
    rank: int


def make_plan(call: Call, spec: Spec, fixed_output: Layout | None = None) -> CallPlan | None:
    """The cheapest plan, or None when `fixed_output` (in-place: self's layout) cannot be had."""
    layouts = [o.layout for o in call.operands]
    mesh, mesh_shape = layouts[0].mesh, layouts[0].mesh_shape
    ndim = len(mesh_shape)
    chosen: list[_Candidate] = []
    sharded: dict[int, list[int]] = {}
    for m in range(ndim):
        want = None if fixed_output is None else fixed_output.placements[m]
        best, best_cost = None, (0.0, 0)
        for candidate in _candidates(spec, layouts, m, mesh_shape, sharded, want):
            if want is not None and candidate.outs and candidate.outs[0] is not want:
                continue
            cost = (_cost(spec, candidate, layouts, m, mesh_shape[m]), candidate.rank)
            if best is None or cost < best_cost:
                best, best_cost = candidate, cost
        if best is None:
            return None
        chosen.append(best)
        if best.factor is not None:
            sharded.setdefault(best.factor, []).append(m)
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
    local = None if spec.localize is None else spec.localize(decided)
    has_terms = any(out.dual is not out for out in outs)
    joined = spec.joined(decided) if spec.joined is not None and has_terms else None
    moved = any(src is not dst for src, dst in zip(layouts, ins, strict=True))
    return CallPlan(operands, outs, varying, local, spec.is_view and moved, joined)


def _cast_dims(src: Layout, dst: Layout, varying: tuple[int, ...]) -> tuple[int, ...]:
    # A value gathered from shards for a varying computation gets its gradient by reduce-scatter instead of by a cast.
    return tuple(m for m in varying if dst.placements[m] is _R and not isinstance(src.placements[m], Shard))


def _candidates(
    spec: Spec,
    layouts: Sequence[Layout],
    m: int,
    mesh_shape: tuple[int, ...],
    sharded: Mapping[int, list[int]],
    want: Placement | None,
) -> list[_Candidate]:
    if spec.acceptable:
        return [_Candidate(a.ins, a.outs, None, rank) for rank, a in enumerate(spec.acceptable)]
    found: list[_Candidate] = []
    factors: list[int] = []
    for dims, layout in zip(spec.ins, layouts, strict=True):
        p = layout.placements[m]
        if isinstance(p, Shard):
            f = dims[p.dim]
            if f is not None and f not in factors:
                factors.append(f)
    if isinstance(want, Shard) and spec.outs:
        f = spec.outs[0][want.dim]
        if f is not None and f not in factors:
            factors.append(f)
    for f in factors:
        candidate = _shard(spec, f, m, mesh_shape, sharded)
        if candidate is not None:
            found.append(candidate)
    for group in spec.linear:
        ops = {p.reduce_op for i in group if isinstance(p := layouts[i].placements[m], Partial)}
        if isinstance(want, Partial):
            ops.add(want.reduce_op)
        if len(ops) == 1 and (spec.moves_only or ops <= {"sum", "avg"}):
            p = Partial(ops.pop())
            found.append(
                _Candidate(tuple(p if i in group else _R for i in range(len(spec.ins))), (p,) * len(spec.outs), None, 1)
            )
    found.append(_Candidate((_R,) * len(spec.ins), (_R,) * len(spec.outs), None, 2))
    return found


def _shard(
    spec: Spec, f: int, m: int, mesh_shape: tuple[int, ...], sharded: Mapping[int, list[int]]
) -> _Candidate | None:
    if f in spec.whole:
        return None
    if f in spec.even:
        ranks = prod(mesh_shape[k] for k in (*sharded.get(f, ()), m))
        if any(n % ranks for n in spec.even[f]):
            return None
    outs: list[Placement] = []
    for dims in spec.outs:
        if f in dims:
            outs.append(Shard(dims.index(f)))
        elif f in spec.reduce:
            outs.append(Partial(spec.reduce[f]))
        else:
            return None
    term = Partial(spec.reduce[f]) if f in spec.reduce else _R
    ins = tuple(
        Shard(dims.index(f)) if f in dims else term if i in spec.addends else _R for i, dims in enumerate(spec.ins)
    )
    return _Candidate(ins, tuple(outs), f, 0)


def _cost(spec: Spec, candidate: _Candidate, layouts: Sequence[Layout], m: int, n: int) -> float:
    """Elements that one rank receives, roughly: enough to compare candidates of one mesh dim."""
    if n == 1:
        return 0.0
    share = (n - 1) / n
    total = 0.0
    for i, (layout, need) in enumerate(zip(layouts, candidate.ins, strict=True)):
        have = layout.placements[m]
        if have is need or have is _R or i in spec.unread:
            continue
        size = prod(layout.shape)
        if isinstance(have, Shard):
            total += size * share / n if isinstance(need, Shard) else size * share
        else:
            total += size * share if isinstance(need, Shard) else 2 * size * share
    if candidate.factor is None and not spec.keeps_terms:
        # Terms that pass through are reduced later at the output's size, a factor's terms must be reduced in any case.
        total += sum(
            2 * prod(shape) * share
            for shape, p in zip(spec.shapes, candidate.outs, strict=True)
            if isinstance(p, Partial)
        )
    return total
