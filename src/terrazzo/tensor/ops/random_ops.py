"""The random operations on DTensors, all based on `random.fill`."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from terrazzo.layout import Layout, Replicate, Shard
from terrazzo.tensor import random
from terrazzo.tensor.copied_view import check_writable, pass_on
from terrazzo.tensor.counter import AnyWords
from terrazzo.tensor.dispatch.spec import Call, LocalFunction, Operand, Spec, within
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.questions import in_boxes
from terrazzo.tensor.ops.table import decomposition, handler, rule
from terrazzo.tensor.redistribute import boxes_of, redistribute_local


@handler("rand_like", "randn_like")
def random_like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0] if args else kwargs["input"]
    layout = boxes_of(source._layout)
    make = random.uniform if func.__name__.startswith("rand_like") else random.normal
    dtype = kwargs.get("dtype") or source.dtype
    _check_parameters(dtype, "uniform_" if make is random.uniform else "normal_")
    local = make(layout, dtype, kwargs.get("generator"))
    return wrap(local, layout).requires_grad_(bool(kwargs.get("requires_grad")))


@handler("randint_like")
def randint_like(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, *bounds = args
    if "high" in kwargs:
        bounds = [*bounds, kwargs["high"]]
    if "low" in kwargs:
        bounds = [kwargs["low"], *bounds]
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    dtype = kwargs.get("dtype") or source.dtype
    _check_parameters(dtype, "random_", low, high)
    layout = boxes_of(source._layout)
    local = random.drawn(layout, dtype, kwargs.get("generator"), _integers(low, high))
    return wrap(local, layout).requires_grad_(bool(kwargs.get("requires_grad")))


_FOR_CHECKS = torch.Generator()


def _check_parameters(dtype: torch.dtype, method: str, *args: Any, numel: int = 1, **kwargs: Any) -> None:
    """Raise PyTorch's error for parameters or a dtype that a distribution does not support."""
    getattr(torch.empty(min(numel, 1), dtype=dtype, device="cpu"), method)(*args, **kwargs, generator=_FOR_CHECKS)


def _fill(method: str, make: Callable[..., random.Make]) -> None:
    """Register an in-place random operation; `make(dtype, *parameters)` returns what `random.fill` takes."""

    def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(func, types.FunctionType):
            return NotImplemented  # the function of this name in `torch.nn.init`, whose body calls the tensor's method
        target, *parameters = args
        named = dict(kwargs)
        generator = named.pop("generator", None)
        check_writable(target)
        _check_parameters(target.dtype, method, *parameters, numel=target.numel(), **named)
        return _write(target, generator, make(target.dtype, *parameters, **named))

    handler(method)(run)


def _write(target: DTensor, generator: Any, make: random.Make, *aligned: torch.Tensor) -> DTensor:
    """Fill a tensor, in place."""
    layout = target._layout
    in_graph = torch.is_grad_enabled() and target.requires_grad  # autograd must record that the old values are gone
    if not in_graph and layout.dual is layout and target._local.is_contiguous():
        random.fill(target._local, layout, generator, make, *aligned)
    else:
        target._local.copy_(random.drawn(layout, target.dtype, generator, make, *aligned))
    pass_on(target)
    return target


def _uniform(dtype: torch.dtype, a: float = 0.0, b: float = 1.0, **named: float) -> random.Make:
    low, high = named.get("from", a), named.get("to", b)
    if (low, high) == (0, 1):
        return lambda words: random.standard_uniform(words, dtype)

    def make(words: AnyWords) -> torch.Tensor:
        drawn = random.standard_uniform(words, dtype).mul_(high - low).add_(low).to(dtype.to_real())
        return drawn.masked_fill_(drawn == high, low)  # rounding may give `high`, which is outside the range

    return make


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> random.Make:
    if dtype.is_complex:
        std *= math.sqrt(0.5)
    return lambda words: random.standard_normal(words, dtype).mul_(std).add_(mean)


def _exponential(dtype: torch.dtype, lambd: float = 1.0) -> random.Make:
    return lambda words: random.standard_exponential(words, dtype).div_(lambd)


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> random.Make:
    # The cotangent instead of the tangent, because its pole is at 0, where floats are most precise.
    return lambda words: (
        random.centred_uniform(words, dtype).mul_(math.pi).tan_().reciprocal_().mul_(sigma).add_(median)
    )


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> random.Make:
    return lambda words: random.standard_normal(words, dtype).mul_(std).add_(mean).exp_()


def _geometric(dtype: torch.dtype, p: float) -> random.Make:
    """Computed in float64: for a small `p` neighbouring results differ little before they are rounded."""
    return lambda words: random.standard_exponential(words, torch.float64).div_(-math.log1p(-p)).ceil_()


def _random(dtype: torch.dtype, *bounds: Any, **named: Any) -> random.Make:
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 0}.get(dtype)
    top = (1 << digits) + 1 if digits is not None else torch.iinfo(dtype).max + 1
    low, high = named.get("from", 0), named.get("to")
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds
    return _integers(low, top if high is None else high)


def _integers(low: int, high: int) -> random.Make:
    """Integers in [low, high); the range may have up to 2**64 of them."""
    count = high - low

    def make(words: AnyWords) -> torch.Tensor:
        drawn = random.bits64(words)
        if count & (count - 1) == 0:
            drawn = drawn if count >> 64 else drawn.bitwise_and_(count - 1)
        elif count >> 63:  # more than int64 can hold: at most one multiple of `count` fits into 64 bits
            beyond = drawn.bitwise_xor(-(1 << 63)) >= count - (1 << 63)
            drawn.sub_(beyond.to(torch.int64), alpha=count - (1 << 64))
        else:
            drawn.bitwise_and_((1 << 63) - 1).remainder_(count)
        return drawn.add_(low)

    return make


_fill("uniform_", _uniform)
_fill("normal_", _normal)
_fill("exponential_", _exponential)
_fill("cauchy_", _cauchy)
_fill("log_normal_", _log_normal)
_fill("geometric_", _geometric)
_fill("random_", _random)


def _below(dtype: torch.dtype) -> random.Make:
    """True with the probability given for each element."""

    def make(words: AnyWords, probability: torch.Tensor) -> torch.Tensor:
        if dtype == torch.float64:
            return random.standard_uniform(words, dtype) < probability
        return words.word().to(torch.float64).add_(2.0**31).mul_(2.0**-32) < probability

    return make


@handler("bernoulli_")
def bernoulli_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, *rest = args
    p = rest[0] if rest else kwargs.get("p", 0.5)
    check_writable(target)
    if not isinstance(p, DTensor):
        _check_parameters(target.dtype, "bernoulli_", p, numel=target.numel())
        return _write(target, kwargs.get("generator"), lambda words: random.true_with(words, float(p)))
    if p.shape != target.shape:
        p = p.expand(target.shape)
    local = redistribute_local(p._local.detach(), p._layout, boxes_of(target._layout))
    return _write(target, kwargs.get("generator"), _below(p.dtype), local)


@handler("bernoulli")
def bernoulli(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0] if args else kwargs["input"]
    p = args[1] if len(args) > 1 else kwargs.get("p")
    reduced = in_boxes(source)
    layout, dtype = reduced._layout, source.dtype
    if p is None:
        probability = reduced._local.detach()
        drawn = random.drawn(layout, dtype, kwargs.get("generator"), _below(dtype), probability)
    else:
        _check_parameters(dtype, "bernoulli_", p)
        drawn = random.drawn(layout, dtype, kwargs.get("generator"), lambda words: random.true_with(words, float(p)))
    result = wrap(tied_to(drawn, reduced._local), reduced._layout)  # the source requires a gradient, which is 0
    if kwargs.get("out") is not None:
        kwargs["out"].copy_(result)
        return kwargs["out"]
    return result


@handler("normal")
def normal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torch.normal(mean, std) with DTensors for either or both."""
    mean = args[0] if args else kwargs.get("mean", 0.0)
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    if kwargs.get("out") is not None or not any(isinstance(v, DTensor) for v in (mean, std)):
        return NotImplemented
    mean, std = (in_boxes(v) if isinstance(v, DTensor) else v for v in (mean, std))
    shaped = mean + 0 * std if isinstance(mean, DTensor) else mean + std * 0
    reduced = in_boxes(shaped)
    noise = wrap(random.normal(reduced._layout, reduced.dtype, kwargs.get("generator")), reduced._layout)
    drawn = cast(DTensor, (mean + noise * std).detach())
    sources = [v._local for v in (mean, std) if isinstance(v, DTensor)]
    return wrap(tied_to(drawn._local, *sources), drawn._layout)


def _dropped(x: DTensor, p: float, mask_shape: Sequence[int]) -> tuple[DTensor, torch.Tensor]:
    """`x` without terms, and its local mask (True is kept); `mask_shape` has 1 where a whole dim shares one draw."""
    reduced = in_boxes(x)
    layout = reduced._layout
    if tuple(mask_shape) != tuple(layout.shape):
        placements = [Replicate() if isinstance(q, Shard) and mask_shape[q.dim] == 1 else q for q in layout.placements]
        layout = Layout.of(layout.mesh, placements, mask_shape, layout.order)
    return reduced, random.keep_mask(layout, 1 - p)


def _dropout(
    func: Any, x: DTensor, p: float, train: bool, inplace: bool, mask_shape: Sequence[int], alpha: float = 0.0
) -> torch.Tensor:
    """With `alpha`, what is dropped gets a negative value, and all are scaled so that mean and variance stay."""
    if not 0 <= p <= 1:
        func(torch.empty(0, device="cpu"), p, train)  # raises for an invalid `p`
    if not train or p == 0 or not x.numel():
        return x  # itself, as in PyTorch, and no number is drawn
    if p == 1:
        return x.mul_(0) if inplace else x * 0
    reduced, keep = _dropped(x, p, mask_shape)
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p)) if alpha else 1 / (1 - p)
    if inplace and reduced is x and not alpha:
        check_writable(x)
        x._local.mul_(keep).mul_(scale)
        pass_on(x)
        return x
    local = (reduced._local * keep).mul_(scale)
    if alpha:
        local.add_(torch.where(keep, alpha * scale * p, alpha * scale * (p - 1)).to(x.dtype))
    result = wrap(local, reduced._layout)
    return x.copy_(result) if inplace else result


@rule("dropout", draws=True)
def dropout_that_drops(
    call: Call, input: Operand, p: Any = 0.5, train: Any = True, inplace: Any = False, *, training: Any = True
) -> Spec | None:
    """Most calls of dropout, planned once: the mask depends on the layout only."""
    if not 0 <= p <= 1:
        call.func(torch.empty(0, device="cpu"), p, True)  # raises for an invalid `p`
    if call.inplace or inplace or train is not True or training is not True or not isinstance(p, float):
        return None
    if not 0 < p < 1 or not input.numel:
        return None
    return within(input, localize=lambda chosen: _drop_of(chosen.ins[0], 1 - p))


def _drop_of(layout: Layout, p: float) -> LocalFunction:
    factors = random.keep_factors(layout, p)

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        x = loc[0]
        few = factors() if x.dtype is torch.float32 else None
        return (x * random.keep_mask(layout, p)).mul_(1 / p) if few is None else x * few

    return run


@decomposition("dropout")
def dropout(input: Any, p: float = 0.5, train: bool = True, inplace: bool = False, *, training: bool = True) -> Any:
    return _dropout(torch.dropout, input, p, train and training, inplace, input.shape)


@handler(
    *("dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"),
    "feature_alpha_dropout_",
)
def other_dropouts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """In place, of whole features, and those of SELU; which of these, their names say."""
    named = dict(zip(("input", "p", "train", "inplace"), args, strict=False)) | dict(kwargs)
    x, name = named["input"], func.__name__
    shape = [n if d < 2 else 1 for d, n in enumerate(x.shape)] if name.startswith("feature") else x.shape
    train, inplace = named.get("training", named.get("train", False)), named.get("inplace") or name.endswith("_")
    return _dropout(func, x, named.get("p", 0.5), train, inplace, shape, 1.7580993408473766 if "alpha" in name else 0.0)


@handler("native_dropout")
def native_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    named = dict(zip(("input", "p", "train"), args, strict=False)) | dict(kwargs)
    x, p = named["input"], named["p"]
    if named.get("train") is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if not 0 <= p <= 1:
        func(torch.empty(1, device="cpu"), p, True)  # raises for an invalid `p`
    reduced, keep = _dropped(x, p, x.shape)
    return wrap((reduced._local * keep).mul_(0.0 if p == 1 else 1 / (1 - p)), reduced._layout), wrap(
        keep, reduced._layout
    )
