"""The random operations on DTensors, all made from `random.uniform`, `random.normal` and `random.bits`."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from terrazzo.layout import Layout, Replicate, Shard
from terrazzo.tensor import random
from terrazzo.tensor.copied_view import check_writable, pass_on
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.table import handler
from terrazzo.tensor.redistribute import redistribute_local


def _settled(x: Any) -> DTensor:
    """`x` without terms: what is random must be the same on every rank that holds an element."""
    layout = x._layout
    if layout.dual is layout:
        return x
    return wrap(redistribute_local(x._local, layout, layout.dual), layout.dual)


def _plain_layout(layout: Layout) -> Layout:
    return layout.with_placements([p if isinstance(p, Shard) else Replicate() for p in layout.placements], layout.order)


@handler("rand_like", "randn_like")
def random_like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0] if args else kwargs["input"]
    layout = _plain_layout(source._layout)
    make = random.uniform if func.__name__.startswith("rand_like") else random.normal
    local = make(layout, kwargs.get("dtype") or source.dtype)
    return wrap(local, layout).requires_grad_(bool(kwargs.get("requires_grad")))


@handler("randint_like")
def randint_like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, *bounds = args
    if "high" in kwargs:
        bounds = [*bounds, kwargs["high"]]
    if "low" in kwargs:
        bounds = [kwargs["low"], *bounds]
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    layout = _plain_layout(source._layout)
    drawn = random.bits(layout, source.device)
    local = (drawn & ((1 << 62) - 1)).remainder_(high - low).add_(low).to(kwargs.get("dtype") or source.dtype)
    return wrap(local, layout).requires_grad_(bool(kwargs.get("requires_grad")))


def _fill(name: str, make: Callable[..., torch.Tensor]) -> None:
    """Register an in-place filling operation `make(layout, dtype, generator, *parameters) -> local`."""

    def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(func, types.FunctionType):
            return NotImplemented  # `torch.nn.init`'s function of this name: its body comes back with the tensor's own
        target, *parameters = args
        named = dict(kwargs)
        generator = named.pop("generator", None)
        check_writable(target)
        plain = _plain_layout(target._layout)
        local = make(plain, target.dtype, generator, *parameters, **named)
        if plain is not target._layout:
            local = redistribute_local(local, plain, target._layout)
        target._local.copy_(local)
        pass_on(target)
        return target

    handler(name)(run)


def _uniform(
    layout: Layout, dtype: Any, generator: Any, a: float = 0.0, b: float = 1.0, **named: float
) -> torch.Tensor:
    low, high = named.get("from", a), named.get("to", b)
    return random.uniform(layout, dtype, generator).mul_(high - low).add_(low)


def _normal(layout: Layout, dtype: Any, generator: Any, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return random.normal(layout, dtype, generator).mul_(std).add_(mean)


def _open_unit(layout: Layout, generator: Any) -> torch.Tensor:
    """Uniform in the open interval (0, 1), in float64."""
    high = random.bits(layout, layout.mesh.device_type, generator) & ((1 << 52) - 1)
    return high.to(torch.float64).add_(0.5).mul_(2.0**-52)


def _exponential(layout: Layout, dtype: Any, generator: Any, lambd: float = 1.0) -> torch.Tensor:
    return _open_unit(layout, generator).log_().div_(-lambd).to(dtype)


def _cauchy(layout: Layout, dtype: Any, generator: Any, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return _open_unit(layout, generator).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median).to(dtype)


def _log_normal(layout: Layout, dtype: Any, generator: Any, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return random.normal(layout, torch.float64, generator).mul_(std).add_(mean).exp_().to(dtype)


def _geometric(layout: Layout, dtype: Any, generator: Any, p: float) -> torch.Tensor:
    return _open_unit(layout, generator).log_().div_(math.log1p(-p)).ceil_().to(dtype)


def _random(layout: Layout, dtype: Any, generator: Any, *bounds: Any, **named: Any) -> torch.Tensor:
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 1}.get(dtype)
    top = (1 << digits) if digits is not None else torch.iinfo(dtype).max
    low, high = named.get("from", 0), named.get("to", top)
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds[0], bounds[1] if bounds[1] is not None else top
    drawn = random.bits(layout, layout.mesh.device_type, generator)
    return (drawn & ((1 << 62) - 1)).remainder_(high - low).add_(low).to(dtype)


_fill("uniform_", _uniform)
_fill("normal_", _normal)
_fill("exponential_", _exponential)
_fill("cauchy_", _cauchy)
_fill("log_normal_", _log_normal)
_fill("geometric_", _geometric)
_fill("random_", _random)


@handler("bernoulli_")
def bernoulli_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, *rest = args
    p = rest[0] if rest else kwargs.get("p", 0.5)
    check_writable(target)
    plain = _plain_layout(target._layout)
    chance = random.uniform(plain, torch.float64, kwargs.get("generator"))
    if isinstance(p, DTensor):
        p = redistribute_local(p._local, p._layout, plain)
    local = (chance < p).to(target.dtype)
    target._local.copy_(local if plain is target._layout else redistribute_local(local, plain, target._layout))
    pass_on(target)
    return target


@handler("bernoulli")
def bernoulli(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0] if args else kwargs["input"]
    p = args[1] if len(args) > 1 else kwargs.get("p")
    settled = _settled(source)
    chance = random.uniform(settled._layout, torch.float64, kwargs.get("generator"))
    threshold = settled._local.detach() if p is None else p
    drawn = (chance < threshold).to(source.dtype)
    result = wrap(_without_gradient(drawn, settled._local), settled._layout)
    if kwargs.get("out") is not None:
        kwargs["out"].copy_(result)
        return kwargs["out"]
    return result


@handler("normal")
def normal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torch.normal(mean, std) with DTensors for either."""
    mean = args[0] if args else kwargs.get("mean", 0.0)
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    if kwargs.get("out") is not None or not any(isinstance(v, DTensor) for v in (mean, std)):
        return NotImplemented
    mean, std = (_settled(v) if isinstance(v, DTensor) else v for v in (mean, std))
    shaped = mean + 0 * std if isinstance(mean, DTensor) else mean + std * 0
    settled = _settled(shaped)
    noise = wrap(random.normal(settled._layout, settled.dtype, kwargs.get("generator")), settled._layout)
    drawn = cast(DTensor, (mean + noise * std).detach())
    sources = [v._local for v in (mean, std) if isinstance(v, DTensor)]
    return wrap(_without_gradient(drawn._local, *sources), drawn._layout)


def _without_gradient(drawn: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """What was drawn, as PyTorch has it: it requires a gradient where its sources do, and theirs is 0."""
    if not (torch.is_grad_enabled() and any(source.requires_grad for source in sources)):
        return drawn
    result: torch.Tensor = _WithoutGradient.apply(drawn, *sources)
    return result


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drawn: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.sources = [(source.shape, source.dtype, source.device) for source in sources]
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, *[torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.sources]


def _dropped(x: DTensor, p: float, mask_shape: Sequence[int]) -> tuple[DTensor, torch.Tensor]:
    """A settled `x`, and its mask's local part (True is kept); `mask_shape` has 1 where one draw serves a whole dim."""
    settled = _settled(x)
    layout = settled._layout
    if tuple(mask_shape) == tuple(layout.shape):
        return settled, random.uniform(layout, torch.float64) >= p
    placements = [Replicate() if isinstance(q, Shard) and mask_shape[q.dim] == 1 else q for q in layout.placements]
    masked = Layout.of(layout.mesh, placements, mask_shape)
    return settled, random.uniform(masked, torch.float64) >= p


def _dropout(x: DTensor, p: float, train: bool, inplace: bool, mask_shape: Sequence[int]) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not train or p == 0:
        return x if inplace else x * 1
    settled, keep = _dropped(x, p, mask_shape)
    scaled = keep.to(x.dtype).mul_(0.0 if p == 1 else 1 / (1 - p))
    if inplace:
        check_writable(x)
        if settled is x:
            x._local.mul_(scaled)
            pass_on(x)
        else:
            x.copy_(wrap(settled._local * scaled, settled._layout))
        return x
    return wrap(settled._local * scaled, settled._layout)


@handler("dropout", "dropout_")
def dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("input", "p", "train", "inplace"), args, strict=False)) | dict(kwargs)
    train = named.get("training", named.get("train", True))
    inplace = bool(named.get("inplace")) or func.__name__.endswith("_")
    x = named["input"]
    return _dropout(x, named.get("p", 0.5), train, inplace, x.shape)


@handler("feature_dropout", "feature_dropout_")
def feature_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("input", "p", "train"), args, strict=False)) | dict(kwargs)
    x = named["input"]
    shape = [n if d < 2 else 1 for d, n in enumerate(x.shape)]
    return _dropout(x, named["p"], named["train"], func.__name__.endswith("_"), shape)


def _alpha_dropped(x: DTensor, p: float, train: bool, mask_shape: Sequence[int]) -> torch.Tensor:
    if not train or p == 0:
        return x * 1
    if p == 1:
        return x * 0
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    settled, keep = _dropped(x, p, mask_shape)
    kept = keep.to(x.dtype)
    return wrap(settled._local * (kept * scale) + ((kept - 1) * alpha * scale + alpha * scale * p), settled._layout)


@handler("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")
def alpha_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("input", "p", "train", "inplace"), args, strict=False)) | dict(kwargs)
    x = named["input"]
    by_feature = func.__name__.startswith("feature")
    shape = [n if d < 2 else 1 for d, n in enumerate(x.shape)] if by_feature else x.shape
    train = named.get("training", named.get("train", False))
    result = _alpha_dropped(x, named.get("p", 0.5), train, shape)
    if named.get("inplace") or func.__name__.endswith("_"):
        return x.copy_(result)
    return result


@handler("native_dropout")
def native_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("input", "p", "train"), args, strict=False)) | dict(kwargs)
    x, p = named["input"], named["p"]
    if named.get("train") is False or p == 0:
        return x * 1, torch.ones_like(x, dtype=torch.bool)
    settled, keep = _dropped(x, p, x.shape)
    scaled = keep.to(x.dtype).mul_(0.0 if p == 1 else 1 / (1 - p))
    return wrap(settled._local * scaled, settled._layout), wrap(keep, settled._layout)
