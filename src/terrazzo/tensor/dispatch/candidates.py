"""The candidates of one mesh dim: the ways to run a call along it that a rule's `Spec` allows.

A candidate shards one factor that some operand is already sharded on, passes partial terms through a linear function,
or replicates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.placement import CUTS, _StridedShard
from terrazzo.tensor.dispatch.spec import Spec

_R = Replicate()


@dataclass(frozen=True, slots=True)
class Candidate:
    """Placements of the operands and the placements of the outputs that follow from them.

    `factor` is the one that is sharded. `rank` decides between equal costs: lower where each rank computes less.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    factor: int | None
    rank: int


def candidates_of(
    spec: Spec,
    layouts: Sequence[Layout],
    m: int,
    mesh_shape: tuple[int, ...],
    sharded: Mapping[int, list[int]],
    in_pieces: Collection[int],
    want: Placement | None,
) -> list[Candidate]:
    """The candidates of mesh dim `m`; `want` is the required placement of an output that is given (in-place).

    `sharded` has, for each factor, the mesh dims before `m` that shard it, and `in_pieces` those factors of which one
    mesh dim cuts several pieces, so that no other can.
    """
    if spec.acceptable:
        return [Candidate(a.ins, a.outs, None, rank) for rank, a in enumerate(spec.acceptable)]
    found: list[Candidate] = []
    cuts: list[tuple[int | None, int]] = []
    for dims, layout in zip(spec.ins, layouts, strict=True):
        p = layout.placements[m]
        if isinstance(p, CUTS):
            cut = dims[p.dim], _pieces(p)
            if cut[0] is not None and cut not in cuts:
                cuts.append(cut)
    if isinstance(want, CUTS) and spec.outs:
        cut = spec.outs[0][want.dim], _pieces(want)
        if cut[0] is not None and cut not in cuts:
            cuts.append(cut)
    for f, pieces in cuts:
        candidate = None if f is None or f in in_pieces else _shard(spec, f, pieces, m, mesh_shape, sharded)
        if candidate is not None:
            found.append(candidate)
    for group in spec.linear:
        ops = {p.reduce_op for i in group if isinstance(p := layouts[i].placements[m], Partial)}
        if isinstance(want, Partial):
            ops.add(want.reduce_op)
        if len(ops) == 1 and (spec.moves_only or ops <= {"sum", "avg"}):
            p = Partial(ops.pop())
            found.append(
                Candidate(tuple(p if i in group else _R for i in range(len(spec.ins))), (p,) * len(spec.outs), None, 1)
            )
    found.append(Candidate((_R,) * len(spec.ins), (_R,) * len(spec.outs), None, 2))
    return found


def _pieces(p: Shard | _StridedShard) -> int:
    return 1 if isinstance(p, Shard) else p.split_factor


def _shard(
    spec: Spec, f: int, pieces: int, m: int, mesh_shape: tuple[int, ...], sharded: Mapping[int, list[int]]
) -> Candidate | None:
    if f in spec.whole:
        return None
    # Each element of a loop is computed by itself or summed, so ranks may hold other ones than a chunk of them; unless
    # the rule says what of the loop this rank has (`localize`), or splits it (`even`), or other mesh dims cut it, too.
    if pieces > 1 and (f in spec.even or f in sharded or spec.localize is not None):
        return None
    if f in spec.even:
        ranks = prod(mesh_shape[k] for k in (*sharded.get(f, ()), m))
        if any(n % ranks for n in spec.even[f]):
            return None
    outs: list[Placement] = []
    for dims in spec.outs:
        if f in dims:
            outs.append(_cut(dims.index(f), pieces))
        elif f in spec.reduce:
            outs.append(Partial(spec.reduce[f]))
        else:
            return None
    term = Partial(spec.reduce[f]) if f in spec.reduce else _R
    ins = tuple(
        _cut(dims.index(f), pieces) if f in dims else term if i in spec.addends else _R
        for i, dims in enumerate(spec.ins)
    )
    return Candidate(ins, tuple(outs), f, 0)


def _cut(dim: int, pieces: int) -> Placement:
    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)
