"""The candidates of one mesh dim: the ways to run a call along it that a rule's `Spec` allows, and what each costs.

A candidate shards one factor that some operand is already sharded on, passes partial terms through a linear function,
or replicates.

Costs are counted in elements that one rank receives, on a mesh dim of n ranks and for a tensor of s elements (s is
smaller where other mesh dims shard the tensor, too):

    shard -> another dim            s (n-1) / n^2     all-to-all
    shard -> replicate, partial     s (n-1) / n       all-gather
    partial -> shard                s (n-1) / n       reduce-scatter; twice that for reductions other than sum and avg
    partial -> replicate           2s (n-1) / n       all-reduce
    shard in pieces -> another      s (n-1) / n       all-gather, also where that is another shard; and the way back
    replicate -> shard              0; s / n where a later mesh dim shards the same tensor dim: it then cuts first

Terms (Partial) that a candidate leaves must be reduced sooner or later, so they count as an all-reduce of the output.
One exception: a contraction whose operands are already sharded on its summed loop (or are replicas, of which a slice is
free) always stays sharded there, as in PyTorch, even if gathering would take fewer bytes. The program has placed them
so on purpose, for row-parallel layers and for weight gradients over a sharded batch, and gathering would make every
rank compute everything.

Between equal costs, the candidate that leaves the least data on each rank wins, then the one that computes the least.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.placement import CUTS, _StridedShard
from terrazzo.tensor.dispatch.spec import Dims, Spec

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
    placed = [(dims, layout.placements[m]) for dims, layout in zip(spec.ins, layouts, strict=True)]
    if want is not None and spec.outs:
        placed.append((spec.outs[0], want))
    for f, pieces in dict.fromkeys((dims[p.dim], _pieces(p)) for dims, p in placed if isinstance(p, CUTS)):
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
            outs.append(cut_of(dims.index(f), pieces))
        elif f in spec.reduce:
            outs.append(Partial(spec.reduce[f]))
        else:
            return None
    term = Partial(spec.reduce[f]) if f in spec.reduce else _R
    ins = tuple(
        cut_of(dims.index(f), pieces) if f in dims else term if i in spec.addends else _R
        for i, dims in enumerate(spec.ins)
    )
    return Candidate(ins, tuple(outs), f, 0)


def cut_of(dim: int, pieces: int) -> Placement:
    """The placement that cuts a dim, or several pieces of it."""
    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


# ------------------------------------------------------------------ costs


@dataclass(frozen=True, slots=True)
class Cost:
    """In elements. `received` is what redistributing the operands receives, `terms` is what reducing the outputs costs
    later (`counted`: whether that counts here), `left` is what a rank then holds of the outputs."""

    received: float
    terms: float
    left: float
    counted: bool

    @property
    def total(self) -> float:
        return self.received + self.terms if self.counted else self.received


@dataclass(slots=True)
class Sizes:
    """The sizes of operands and outputs, updated as one mesh dim after the other chooses."""

    spec: Spec
    layouts: Sequence[Layout]
    chosen: list[Candidate] = field(default_factory=list)

    def cost(self, candidate: Candidate, m: int, n: int) -> Cost:
        """The cost of a candidate of mesh dim `m` with `n` ranks, after the mesh dims before it have chosen."""
        spec, share = self.spec, (n - 1) / n
        received = terms = left = 0.0
        in_place = True
        for i, (layout, need) in enumerate(zip(self.layouts, candidate.ins, strict=True)):
            if i in spec.unread or layout.placements[m] is need:
                continue
            if layout.placements[m] is not _R and (candidate.factor is None or candidate.factor in spec.ins[i]):
                in_place = False
            part = _part(layout, need, m)
            if part:
                received += self._size(layout.shape, spec.ins[i], [c.ins[i] for c in self.chosen], m) * part
        for j, (shape, placement) in enumerate(zip(spec.shapes, candidate.outs, strict=True)):
            size = self._size(shape, spec.outs[j], [c.outs[j] for c in self.chosen], m)
            left += size / n if isinstance(placement, CUTS) else size
            terms += 2 * size * share if isinstance(placement, Partial) else 0.0
        if candidate.factor is None and any(isinstance(p, Partial) for p in candidate.ins):
            return Cost(received, terms, left, not spec.keeps_terms)
        return Cost(received, terms, left, not in_place)

    def _size(self, shape: Sequence[int], dims: Dims, chosen: Sequence[Placement], m: int) -> float:
        """Elements on one rank before the cut by mesh dim `m`. Mesh dims before it have chosen; for those after it, the
        operands' placements are taken as a guess."""
        size = float(prod(shape))
        mesh_shape = self.layouts[0].mesh_shape
        for k, n in enumerate(mesh_shape):
            if k < m:
                cut = isinstance(chosen[k], CUTS)
            else:
                cut = k > m and not self.spec.acceptable and any(f in dims for f in self._sharded_on(k))
            if cut:
                size /= n
        return size

    def _sharded_on(self, k: int) -> list[int]:
        """The factors that operands are sharded on along mesh dim `k`."""
        placed = zip(self.spec.ins, [layout.placements[k] for layout in self.layouts], strict=True)
        return [f for dims, p in placed if isinstance(p, CUTS) and (f := dims[p.dim]) is not None]


def _part(layout: Layout, need: Placement, m: int) -> float:
    """The fraction of a tensor that one rank receives when mesh dim `m` of it is placed as needed."""
    have, n = layout.placements[m], layout.mesh_shape[m]
    share = (n - 1) / n
    if have is need or n == 1:
        return 0.0
    if isinstance(have, Shard):
        return share / n if isinstance(need, Shard) else share
    if isinstance(have, _StridedShard):
        return share
    if isinstance(need, _StridedShard):
        return 0.0 if have is _R else 2 * share
    # The new cut would lie inside one of a later mesh dim but has to end up outside it, so all pieces move.
    moved = 1 / n if isinstance(need, Shard) and need in layout.placements[m + 1 :] else 0.0
    if have is _R:
        return moved
    scatters = isinstance(need, Shard) and isinstance(have, Partial) and have.reduce_op in ("sum", "avg")
    return moved + (share if scatters else 2 * share)
