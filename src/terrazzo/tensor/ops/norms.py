"""Normalisation layers and softmax: functions of rows.

Where a dim that is averaged over is sharded, statistics are always computed over all ranks. Along a sharded dim softmax
exchanges two numbers per row, not the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo.comm.axis import Axis
from terrazzo.comm.differentiable import cast, reduce_replicate
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, Ints, LocalFunction, Operand, Spec, within
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.ops.accumulate import axis_of_shards, in_working_type, rounded, working_type
from terrazzo.tensor.ops.questions import is_cut, is_sharded_along
from terrazzo.tensor.ops.reductions import reduced_dims, reduction
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call, input: Operand, normalized_shape: Sequence[int], *rest: Any, **kwargs: Any) -> Spec | None:
    k = input.ndim - len(normalized_shape)
    if k < 0 or tuple(input.shape[k:]) != tuple(normalized_shape):
        return None
    factors = tuple(range(input.ndim))
    inner = factors[k:]
    if call.name in ("layer_norm", "rms_norm") and is_sharded_along(input, inner):
        return None
    if any(o.shape != tuple(normalized_shape) for o in call.operands[1:]):
        return None
    outs: list[Dims] = [factors]
    shapes = [tuple(input.shape)]
    if call.name in ("native_layer_norm", "_fused_rms_norm"):
        stats = (*factors[:k], *(None for _ in inner))
        count = 2 if call.name == "native_layer_norm" else 1
        outs += [stats] * count
        shapes += [(*input.shape[:k], *(1 for _ in inner))] * count
    return Spec([factors] + [inner] * (len(call.operands) - 1), outs, shapes, whole=frozenset(inner))


def _moments(x: Any, dims: Sequence[int]) -> tuple[Any, Any, Any]:
    """Mean, variance, and `x` minus its mean."""
    mean = x.mean(dims, keepdim=True).redistribute()
    rest = x - mean
    return mean, (rest * rest).mean(dims, keepdim=True).redistribute(), rest


@decomposition("layer_norm")
def layer_norm_of_shards(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    inner = _inner_dims(input, normalized_shape)
    if inner is None:
        return NotImplemented
    _, variance, rest = _moments(in_working_type(input), inner)
    # Rounded once, and so are the parameters' gradients: they are summed over the ranks in the accumulation dtype.
    y = rest * (variance + eps).rsqrt()
    y = y if weight is None else y * in_working_type(weight)
    y = y if bias is None else y + in_working_type(bias)
    return rounded(y, input.dtype)


@decomposition("rms_norm")
def rms_norm_of_shards(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    inner = _inner_dims(input, normalized_shape)
    if inner is None:
        return NotImplemented
    x = in_working_type(input)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * ((x * x).mean(inner, keepdim=True).redistribute() + eps).rsqrt()
    return rounded(y if weight is None else y * in_working_type(weight), input.dtype)


def _inner_dims(x: Any, normalized_shape: Any) -> tuple[int, ...] | None:
    if (
        not isinstance(x, torch.Tensor)
        or isinstance(normalized_shape, int)
        or not x.is_floating_point()
        or not x.numel()
    ):
        return None
    k = x.ndim - len(normalized_shape)
    return tuple(range(k, x.ndim)) if k >= 0 and tuple(x.shape[k:]) == tuple(normalized_shape) else None


@rule("group_norm")
def group_norm(
    call: Call, input: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Spec | None:
    """Sharded over samples, or over channels where that cuts no group."""
    if input.ndim < 2:
        return None
    factors = tuple(range(input.ndim))
    ins: list[Dims] = [factors if o is input else (1,) for o in call.operands]

    def localize(chosen: Chosen) -> LocalFunction | None:
        share = math.prod(chosen.ins[0].mesh_shape[m] for m in chosen.sharded.get(1, ()))
        nothing = _unless_empty(chosen)
        if nothing is not None or share == 1:
            return nothing

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            if "num_groups" in kw:
                return func(*loc, **(kw | {"num_groups": num_groups // share}))
            return func(loc[0], num_groups // share, *loc[2:], **kw)

        return run

    return Spec(
        ins,
        [factors],
        [input.shape],
        whole=frozenset(factors[2:]),
        even={1: (num_groups, input.shape[1])},
        localize=localize,
    )


@rule("batch_norm")
def batch_norm_rule(
    call: Call, input: Operand, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Spec | None:  # fmt: skip
    """Elementwise with given statistics; in training the moments of all ranks are combined to those of the batch."""
    if input.ndim < 2 or any(o.ndim != 1 for o in call.operands[1:]):
        return None
    x = input
    factors: Dims = tuple(range(x.ndim))
    ins = [factors] + [(1,)] * (len(call.operands) - 1)
    if not training:
        return Spec(ins, [factors], [x.shape], localize=_unless_empty)
    # Running statistics are written in place, so they are never redistributed.
    if is_cut(x, (1,)) or not all(o.layout.is_replicated for o in call.operands[1:]) or not x.numel:
        return None

    def localize(chosen: Chosen) -> LocalFunction | None:
        axis = axis_of_shards(chosen)
        return None if axis is None else _in_batch_of(axis, x.shape)

    return Spec(
        ins,
        [factors],
        [x.shape],
        whole=frozenset((1,)),
        localize=localize,
        guard=None if x.layout.is_replicated else _is_wide,
    )


def _is_wide(loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
    """Not of a half type, which is computed in float32, also for parameters' gradients; PyTorch refuses others."""
    return loc[0].dtype in (torch.float32, torch.float64)


def _in_batch_of(axis: Axis, shape: Sequence[int]) -> LocalFunction:
    """`batch_norm` of this rank's part of a batch of the given shape."""
    dims = (0, *range(2, len(shape)))
    count = math.prod(shape) // shape[1]

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        in_python = func is torch.nn.functional.batch_norm
        named = dict(zip(_BATCH_NORM[in_python], loc, strict=False)) | kw
        x, momentum, eps = named["input"], named.get("momentum", 0.1), named.get("eps", 1e-5)
        if in_python and (count == 1 or eps <= 0):
            func(torch.empty(shape, device="meta"), None, None, training=True, eps=eps)  # raises
        mean = reduce_replicate(x.sum(dims, keepdim=True), axis) / count
        rest = x - cast(mean, axis)
        variance = reduce_replicate((rest * rest).sum(dims, keepdim=True), axis) / count
        _track(named.get("running_mean"), named.get("running_var"), mean, variance, count, momentum)
        return _scaled(rest, cast(variance, axis), eps, named.get("weight"), named.get("bias"))

    return run


_BATCH_NORM = (
    ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
"""The order of the arguments in C++, and that in `torch.nn.functional`."""


def _unless_empty(chosen: Chosen) -> LocalFunction | None:
    """An empty shard gives an empty shard.

    PyTorch refuses one, and a row of zeros in its place (`never_empty`) may have no finite normalised values, which
    would be in the gradients of the parameters.
    """
    if all(mine or not n for mine, n in zip(chosen.ins[0].local_shape, chosen.ins[0].shape, strict=True)):
        return None

    def nothing(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        return tied_to(loc[0] * 1, *[v for v in (*loc[1:], *kw.values()) if isinstance(v, torch.Tensor)])

    return nothing


@rule("instance_norm")
def instance_norm_rule(
    call: Call, input: Operand, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Spec | None:  # fmt: skip
    """Without running statistics each channel of each sample is independent."""
    if input.ndim < 3 or not use_input_stats or running_mean is not None or running_var is not None:
        return None
    if is_sharded_along(input, range(2, input.ndim)):
        return None
    factors = tuple(range(input.ndim))
    ins: list[Dims] = [factors, *[(1,)] * (len(call.operands) - 1)]
    return Spec(ins, [factors], [input.shape], whole=frozenset(factors[2:]), localize=_unless_empty)


@decomposition("batch_norm")
def batch_norm(
    input: Any, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """Training: moments of the whole batch over all ranks; running statistics are updated in place."""
    if not training or input.ndim < 2 or not input.is_floating_point():
        return NotImplemented
    x = in_working_type(input)
    dims = (0, *range(2, x.ndim))
    mean, variance, rest = _moments(x, dims)
    count = math.prod(x.shape[d] for d in dims)
    _track(running_mean, running_var, mean, variance, count, momentum)
    return rounded(_scaled(rest, variance, eps, weight, bias), input.dtype)


@decomposition("instance_norm")
def instance_norm(
    input: Any, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """Running statistics are updated with the mean over all samples of each sample's own statistics."""
    if input.ndim < 3:
        return NotImplemented
    x = in_working_type(input)
    if not use_input_stats:
        shape = (-1, *(1,) * (x.ndim - 2))
        y = _scaled(x - running_mean.reshape(shape), in_working_type(running_var).reshape(shape), eps, weight, bias)
        return rounded(y, input.dtype)
    dims = tuple(range(2, x.ndim))
    mean, variance, rest = _moments(x, dims)
    count = math.prod(x.shape[d] for d in dims)
    _track(running_mean, running_var, mean, variance, count, momentum)
    return rounded(_scaled(rest, variance, eps, weight, bias), input.dtype)


def _track(running_mean: Any, running_var: Any, mean: Any, variance: Any, count: int, momentum: float) -> None:
    """Update running statistics with those of `count` values, of the batch or of each sample in it."""
    with torch.no_grad():
        for running, seen in ((running_mean, mean), (running_var, variance * (count / max(count - 1, 1)))):
            if running is not None:
                of_channels = seen.flatten(1).mean(0)
                running.mul_(1 - momentum).add_(of_channels.to(running.dtype), alpha=momentum)


def _scaled(rest: Any, variance: Any, eps: float, weight: Any, bias: Any) -> Any:
    shape = (-1, *(1,) * (rest.ndim - 2))
    scale = (variance + eps).rsqrt()
    y = rest * (scale if weight is None else scale * in_working_type(weight).reshape(shape))
    return y if bias is None else y + in_working_type(bias).reshape(shape)


# ------------------------------------------------------------------ softmax


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "softmin")
def softmax(call: Call, input: Operand, dim: int, *args: Any, **kwargs: Any) -> Spec | None:
    d = norm_dim(dim, input.ndim)
    if call.name in DECOMPOSED and is_sharded_along(input, (d,)):
        return None
    return within(input, (d,))


def _top(x: Any, dims: Sequence[int]) -> Any:
    """The maximum of `x` along `dims`: without it no exponential overflows."""
    return x.detach().amax(dims, keepdim=True).redistribute()


def _of_shifted(function: Callable[[Any, int], Any], input: Any, dim: Any, half_to_float: Any, dtype: Any) -> Any:
    """A function of the input, shifted along a dim, and the dim, computed in the working type and rounded once."""
    dtype = half_to_float if isinstance(half_to_float, torch.dtype) else dtype
    if dtype is None:
        dtype = torch.float32 if half_to_float is True else input.dtype
    if not isinstance(dim, int) or not input.ndim or not input.numel() or not dtype.is_floating_point:
        return NotImplemented
    d = norm_dim(dim, input.ndim)
    x = in_working_type(input).to(working_type(dtype))
    return rounded(function(x - _top(x, (d,)), d), dtype)


@decomposition("softmax", "_softmax")
def softmax_of_shards(
    input: Any, dim: Any = None, half_to_float: Any = None, dtype: Any = None, *, _stacklevel: int = 3
) -> Any:
    def shares(x: Any, d: int) -> Any:
        powers = x.exp()
        return powers / powers.sum(d, keepdim=True).redistribute()

    return _of_shifted(shares, input, dim, half_to_float, dtype)


@decomposition("log_softmax", "_log_softmax")
def log_softmax_of_shards(
    input: Any, dim: Any = None, half_to_float: Any = None, dtype: Any = None, *, _stacklevel: int = 3
) -> Any:
    def logarithms(x: Any, d: int) -> Any:
        return x - x.exp().sum(d, keepdim=True).redistribute().log()

    return _of_shifted(logarithms, input, dim, half_to_float, dtype)


DECOMPOSED = frozenset(["softmax", "_softmax", "log_softmax", "_log_softmax"])


@rule("logsumexp")
def logsumexp(call: Call, input: Operand, dim: Ints, keepdim: bool = False) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if is_cut(input, dims) else reduction(input, dims, keepdim, None)


@decomposition("logsumexp")
def logsumexp_of_shards(input: Any, dim: Ints, keepdim: bool = False) -> Any:
    dims = reduced_dims(dim, input.ndim)
    if not input.ndim or not input.is_floating_point() or not input.numel():
        return NotImplemented
    x = in_working_type(input)
    top = _top(x, dims)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))  # infinities have a sum, and it has a logarithm
    total = (x - top).exp().sum(dims, keepdim).redistribute().log()
    return rounded(total + (top if keepdim else top.reshape(total.shape)), input.dtype)
