"""Gather, scatter and selection by index tensors, dim by dim."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.rules.registry import rule
from terrazzo.tensor.rules.views import norm_dim
from terrazzo.tensor.spec import Call, Dims, Operand, Spec


@rule("gather")
def gather(call: Call, input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Spec | None:
    if not isinstance(index, Operand) or not isinstance(dim, int) or input.ndim != index.ndim or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    along = input.ndim
    # Other dims of the index may be shorter than the input's: only equal ones are one loop.
    same: Dims = tuple(i if i != d and input.shape[i] == index.shape[i] else None for i in range(input.ndim))
    out = tuple(along if i == d else f for i, f in enumerate(same))
    return Spec([same, out], [out], [index.shape])


@rule("index_select")
def index_select(call: Call, input: Operand, dim: int, index: Operand) -> Spec | None:
    if not isinstance(index, Operand) or not isinstance(dim, int) or not input.ndim or index.ndim != 1:
        return None
    d = norm_dim(dim, input.ndim)
    along = input.ndim
    ins: Dims = tuple(None if i == d else i for i in range(input.ndim))
    out = tuple(along if i == d else i for i in range(input.ndim))
    shape = tuple(index.shape[0] if i == d else n for i, n in enumerate(input.shape))
    return Spec([ins, (along,)], [out], [shape], linear=[(0,)])


@rule("tril", "triu")
def triangle(call: Call, input: Operand, diagonal: int = 0) -> Spec | None:
    if input.ndim < 2:
        return None
    factors = tuple(range(input.ndim))
    return Spec([factors], [factors], [input.shape], whole=frozenset(factors[-2:]), linear=[(0,)])


@rule("one_hot")
def one_hot(call: Call, input: Operand, num_classes: int = -1) -> Spec | None:
    if num_classes <= 0:
        return None
    factors = tuple(range(input.ndim))
    return Spec([factors], [(*factors, None)], [(*input.shape, num_classes)])
