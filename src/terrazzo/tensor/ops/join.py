"""cat and stack: the joined dim stays whole, other dims may be sharded.

Partial tensors stay partial; a replicated one that is joined with them becomes a term on one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.ops.table import rule
from terrazzo.tensor.ops.views import norm_dim


@rule("cat")
def cat(call: Call, tensors: Any, dim: int = 0) -> Spec | None:
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, Operand) for t in tensors):
        return None
    if not isinstance(dim, int) or not tensors or any(t.ndim != tensors[0].ndim or not t.ndim for t in tensors):
        return None
    first: Operand = tensors[0]
    d = norm_dim(dim, first.ndim)
    if any(t.shape[:d] != first.shape[:d] or t.shape[d + 1 :] != first.shape[d + 1 :] for t in tensors):
        return None
    dims: Dims = tuple(None if i == d else i for i in range(first.ndim))
    shape = tuple(sum(t.shape[d] for t in tensors) if i == d else n for i, n in enumerate(first.shape))
    return Spec(
        [dims] * len(tensors),
        [dims],
        [shape],
        linear=[tuple(range(len(tensors)))],
        moves_only=True,
        localize=_cat(d),
        keeps_terms=True,
    )


def _cat(dim: int) -> Any:
    # torch.cat drops 1-D tensors without elements; an empty shard must be kept, for its other dims.
    def localize(chosen: Chosen) -> LocalFunction | None:
        if all(min(layout.local_shape, default=1) for layout in chosen.ins):
            return None

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            tensors = loc[0] if loc else kw["tensors"]
            full = torch.cat([t.unsqueeze(-1) for t in tensors], dim)
            return full.squeeze(-1)

        return run

    return localize


@rule("stack")
def stack(call: Call, tensors: Any, dim: int = 0) -> Spec | None:
    if not isinstance(tensors, (tuple, list)) or not tensors or not all(isinstance(t, Operand) for t in tensors):
        return None
    first: Operand = tensors[0]
    if not isinstance(dim, int) or any(t.shape != first.shape for t in tensors):
        return None
    d = norm_dim(dim, first.ndim + 1)
    dims = tuple(range(first.ndim))
    out = (*dims[:d], None, *dims[d:])
    shape = (*first.shape[:d], len(tensors), *first.shape[d:])
    everything = tuple(range(len(tensors)))
    return Spec([dims] * len(tensors), [out], [shape], linear=[everything], moves_only=True, keeps_terms=True)
