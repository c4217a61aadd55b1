"""Distances between rows and cross products of rows; the rows stay whole."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Operand, Spec, within
from terrazzo.tensor.ops.loops import loops
from terrazzo.tensor.ops.pointwise import broadcast
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim

_ROWS = loops("...m_, ...n_ -> ...mn")


@rule("cdist")
def cdist(call: Call, x1: Operand, x2: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Every row of x1 with every row of x2."""
    return _ROWS.spec(call.operands) if call.operands == [x1, x2] and x1.shape[-1:] == x2.shape[-1:] else None


@rule("linalg_cross")
def cross(call: Call, input: Operand, other: Operand, *, dim: int = -1) -> Spec | None:
    try:
        out, ins = broadcast([input.shape, other.shape])
    except RuntimeError:
        return None
    if call.operands != [input, other] or input.ndim != other.ndim or not input.ndim:
        return None
    d = norm_dim(dim, len(out))
    return Spec(ins, [tuple(range(len(out)))], [out], whole=frozenset((d,)), linear=[(0,), (1,)])


@rule("renorm")
def renorm(call: Call, input: Operand, p: Any, dim: int, maxnorm: Any) -> Spec | None:
    """Each slice of `dim` by itself."""
    if len(call.operands) != 1 or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    return within(input, set(range(input.ndim)) - {d})


@decomposition("dist")
def dist(input: Any, other: Any, p: Any = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)
