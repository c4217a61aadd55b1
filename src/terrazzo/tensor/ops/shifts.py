"""flip, roll and rot90, which move elements along dims that stay whole; other dims may be sharded, and terms pass."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Operand, Spec, within
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


def _within(input: Operand, dims: Any) -> Spec | None:
    named = [dims] if isinstance(dims, int) else dims
    if not input.ndim or not isinstance(named, (list, tuple)) or not all(isinstance(d, int) for d in named):
        return None
    return within(input, [norm_dim(d, input.ndim) for d in named], linear=[(0,)], moves_only=True)


@rule("flip")
def flip(call: Call, input: Operand, *dims: Any, **named: Any) -> Spec | None:
    if "dims" in named:
        dims = (named.pop("dims"),)
    return None if named else _within(input, dims[0] if len(dims) == 1 else dims)


@rule("roll")
def roll(call: Call, input: Operand, shifts: Any, dims: Any = None) -> Spec | None:
    """Without `dims` the flattened tensor is rolled."""
    return _within(input, tuple(range(input.ndim)) if dims is None or dims == () or dims == [] else dims)


@decomposition("rot90")
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    if len(dims) != 2 or input.ndim < 2 or norm_dim(dims[0], input.ndim) == norm_dim(dims[1], input.ndim):
        return NotImplemented  # invalid arguments: the function itself raises the error
    first, second = dims
    if k % 4 == 0:
        return input.clone(memory_format=torch.contiguous_format)
    if k % 4 == 2:
        return input.flip((first, second))
    return input.flip(second if k % 4 == 1 else first).transpose(first, second)
