"""softmax, log_softmax and logsumexp. Along a sharded dim two numbers per row are exchanged, not the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.layout import Partial
from terrazzo.tensor.dispatch.spec import Call, Operand, Spec, within
from terrazzo.tensor.ops.accumulate import in_working_type, rounded, working_type
from terrazzo.tensor.ops.questions import is_sharded_along
from terrazzo.tensor.ops.reductions import reduced_dims, reduction
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "softmin")
def softmax(call: Call, input: Operand, dim: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        return None
    d = norm_dim(dim, input.ndim)
    if call.name in DECOMPOSED and is_sharded_along(input, (d,)):
        return None
    return within(input, (d,))


def _in_working_type(x: Any, dtype: Any, to_float: Any) -> tuple[Any, Any]:
    """`x` in the dtype to compute in, and the dtype of the result: half types are summed in float32, as in PyTorch."""
    if dtype is None:
        dtype = torch.float32 if to_float is True else x.dtype
    work = working_type(dtype)
    x = in_working_type(x)
    return (x if x.dtype == work else x.to(work)), dtype


def _shifted(x: Any, dims: Sequence[int]) -> tuple[Any, Any]:
    """`x` minus its maximum along `dims`, so that no exponential overflows, and the maximum."""
    top = x.detach().amax(dims, keepdim=True).redistribute()
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    return x - top, top


def _rows(x: Any, dim: Any, dtype: Any) -> int | None:
    """The dim if it is sharded, so that there is something to decompose, else None."""
    if not isinstance(dim, int) or not x.ndim or not x.numel() or not (dtype or x.dtype).is_floating_point:
        return None
    return norm_dim(dim, x.ndim)


@decomposition("softmax", "_softmax")
def softmax_of_shards(
    input: Any, dim: Any = None, half_to_float: Any = None, dtype: Any = None, *, _stacklevel: int = 3
) -> Any:
    dtype = half_to_float if isinstance(half_to_float, torch.dtype) else dtype
    d = _rows(input, dim, dtype)
    if d is None:
        return NotImplemented
    x, result_type = _in_working_type(input, dtype, half_to_float)
    powers = _shifted(x, (d,))[0].exp()
    return rounded(powers / powers.sum(d, keepdim=True).redistribute(), result_type)


@decomposition("log_softmax", "_log_softmax")
def log_softmax_of_shards(
    input: Any, dim: Any = None, half_to_float: Any = None, dtype: Any = None, *, _stacklevel: int = 3
) -> Any:
    dtype = half_to_float if isinstance(half_to_float, torch.dtype) else dtype
    d = _rows(input, dim, dtype)
    if d is None:
        return NotImplemented
    x, result_type = _in_working_type(input, dtype, half_to_float)
    shifted = _shifted(x, (d,))[0]
    return rounded(shifted - shifted.exp().sum(d, keepdim=True).redistribute().log(), result_type)


DECOMPOSED = frozenset(["softmax", "_softmax", "log_softmax", "_log_softmax"])


@rule("logsumexp")
def logsumexp(call: Call, input: Operand, dim: Any, keepdim: bool = False) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    cut = dims is None or is_sharded_along(input, dims) or any(isinstance(p, Partial) for p in input.placements)
    return None if dims is None or cut else reduction(input, dims, keepdim, None)


@decomposition("logsumexp")
def logsumexp_of_shards(input: Any, dim: Any, keepdim: bool = False) -> Any:
    dims = reduced_dims(dim, input.ndim)
    if dims is None or not input.ndim or not input.is_floating_point() or not input.numel():
        return NotImplemented
    shifted, top = _shifted(in_working_type(input), dims)
    total = shifted.exp().sum(dims, keepdim).redistribute().log()
    return rounded(total + (top if keepdim else top.reshape(total.shape)), input.dtype)
