"""What a candidate costs: what a rank receives so that the call can run, and what its terms will cost afterwards.

All is counted in elements that one rank receives, on a mesh dim of n ranks and for a tensor of s elements (s is less
where other mesh dims shard the tensor as well):

    shard -> another dim            s (n-1) / n^2     all-to-all
    shard -> replicate, partial     s (n-1) / n       all-gather
    partial -> shard                s (n-1) / n       reduce-scatter; twice that for reductions other than sum and avg
    partial -> replicate           2s (n-1) / n       all-reduce

Terms (Partial) that a candidate leaves are reduced sooner or later, and count as the all-reduce of the output. There is
one exception: a contraction whose operands lie sharded on its loop already (or are replicas, of which a slice is free)
stays there, as in PyTorch, however few bytes gathering them would take. The program has placed them so, as for
row-parallel layers and for the gradients of weights over a sharded batch, and gathering would have every rank compute
everything.

Among equal costs the candidate wins that leaves the least on each rank, and then the one that computes least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.dispatch.candidates import Candidate
from terrazzo.tensor.dispatch.spec import Dims, Spec

_R = Replicate()


@dataclass(frozen=True, slots=True)
class Cost:
    """In elements. `received` brings the operands to where they are needed, `terms` is what reducing the outputs costs
    later, `left` is what a rank then holds of them. `in_place`: the operands lie on the loop that makes the terms."""

    received: float
    terms: float
    left: float
    in_place: bool

    @property
    def total(self) -> float:
        return self.received if self.in_place else self.received + self.terms

    @property
    def order(self) -> tuple[float, float]:
        return self.total, self.left


@dataclass(slots=True)
class Sizes:
    """The sizes of operands and outputs as the mesh dims choose, one after the other."""

    spec: Spec
    layouts: Sequence[Layout]
    chosen: list[Candidate] = field(default_factory=list)

    def cost(self, candidate: Candidate, m: int, n: int) -> Cost:
        """Of a candidate of mesh dim `m`, of `n` ranks; those before it have chosen."""
        spec, share = self.spec, (n - 1) / n
        received = terms = left = 0.0
        in_place = True
        for i, (layout, need) in enumerate(zip(self.layouts, candidate.ins, strict=True)):
            have = layout.placements[m]
            if have is need or have is _R:
                continue
            if candidate.factor is None or candidate.factor in spec.ins[i]:
                in_place = False
            received += self._size(layout.shape, spec.ins[i], [c.ins[i] for c in self.chosen], m) * _part(have, need, n)
        for j, (shape, placement) in enumerate(zip(spec.shapes, candidate.outs, strict=True)):
            size = self._size(shape, spec.outs[j], [c.outs[j] for c in self.chosen], m)
            left += size / n if isinstance(placement, Shard) else size
            terms += 2 * size * share if isinstance(placement, Partial) else 0.0
        passes = candidate.factor is None and any(isinstance(p, Partial) for p in candidate.ins)
        return Cost(received, terms, left, in_place and not passes)

    def _size(self, shape: Sequence[int], dims: Dims, chosen: Sequence[Placement], m: int) -> float:
        """Elements on one rank but for the cut by mesh dim `m`: mesh dims before it have chosen, of those after it the
        operands' placements tell what they probably will."""
        size = float(prod(shape))
        mesh_shape = self.layouts[0].mesh_shape
        for k, n in enumerate(mesh_shape):
            if k < m:
                cut = isinstance(chosen[k], Shard)
            else:
                cut = k > m and not self.spec.acceptable and any(f in dims for f in self._sharded_on(k))
            if cut:
                size /= n
        return size

    def _sharded_on(self, k: int) -> list[int]:
        """The factors that operands are sharded on along mesh dim `k`."""
        placed = zip(self.spec.ins, [layout.placements[k] for layout in self.layouts], strict=True)
        return [f for dims, p in placed if isinstance(p, Shard) and (f := dims[p.dim]) is not None]


def _part(have: Placement, need: Placement, n: int) -> float:
    """What share of a tensor one rank receives so that it is placed as needed."""
    share = (n - 1) / n
    if isinstance(have, Shard):
        return share / n if isinstance(need, Shard) else share
    once = isinstance(need, Shard) and have.is_partial() and _scatters(have)
    return share if once else 2 * share


def _scatters(have: Placement) -> bool:
    return isinstance(have, Partial) and have.reduce_op in ("sum", "avg")
