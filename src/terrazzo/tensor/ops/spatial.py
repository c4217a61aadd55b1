"""Functions of some dims: pooling, resizing, padding, rearranging, Fourier transforms. The others may be sharded.

The output sizes of pooling and resizing follow rounding rules with many options. PyTorch itself is asked, once per
plan, with a tensor without data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from terrazzo.tensor.dispatch.shapes import of_tensors_without_data
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec, Static, within
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.ops.halo import Window, each, plan_halo
from terrazzo.tensor.ops.loops import loops
from terrazzo.tensor.ops.questions import is_sharded_along
from terrazzo.tensor.ops.reductions import loser
from terrazzo.tensor.ops.table import rule
from terrazzo.tensor.ops.views import norm_dim


def touching(
    call: Call, input: Operand, touched: Collection[int], *, linear: bool = False, **said: bool
) -> Spec | None:
    """The spec of a function that works within the dims `touched` and keeps the others where they are."""
    shapes = shapes_of_results(call) or []
    kept = [d for d in range(input.ndim) if d not in touched]
    if len(set(shapes)) != 1 or len(shapes[0]) != input.ndim or any(shapes[0][d] != input.shape[d] for d in kept):
        return None
    terms = [(0,)] if linear else []
    return within(input, touched, shapes[0], len(shapes), linear=terms, never_empty=True, **said)


def shapes_of_results(call: Call) -> list[tuple[int, ...]] | None:
    """The shapes of the function's results for whole operands, from a run on the meta device."""
    try:
        result = of_tensors_without_data(call)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None  # the call is invalid: it raises its own error when it runs on the real tensors
    outs = [result] if isinstance(result, torch.Tensor) else list(result)
    return [tuple(t.shape) for t in outs] if all(isinstance(t, torch.Tensor) for t in outs) else None


_POOLS = {
    f"{kind}_pool{n}d{suffix}": n
    for n in (1, 2, 3)
    for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "lp")
    for suffix in ("", "_with_indices")
}


@rule(*_POOLS)
def pool(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec | None:
    n = _POOLS[call.name]
    if input.ndim < n:
        return None
    dims = range(input.ndim - n, input.ndim)
    if is_sharded_along(input, dims):
        spec = _pool_of_parts(call, input, n)
        if spec is not None:
            return spec
    return touching(call, input, dims, linear="avg" in call.name)


_POOL_ARGUMENTS = {
    "avg": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "max": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
}


def _pool_windows(call: Call, n: int) -> list[Window] | None:
    """The window of each dim; None where the parts do not give the whole, or PyTorch will refuse the arguments."""
    named = dict(zip(_POOL_ARGUMENTS[call.name[:3]], call.args, strict=False)) | dict(call.kwargs)
    kernels, pads, holes = (
        each(v, n) for v in (named["kernel_size"], named.get("padding", 0), named.get("dilation", 1))
    )
    steps = each(stride, n) if (stride := named.get("stride")) not in (None, (), []) else kernels
    # If padding is not counted, windows at the ends have fewer elements than the halo would count.
    if (
        named.get("ceil_mode")
        or named.get("return_indices")
        or (any(pads) and not named.get("count_include_pad", True))
    ):
        return None
    if min((*kernels, *steps, *holes)) < 1 or any(not 0 <= 2 * p <= k for p, k in zip(pads, kernels, strict=True)):
        return None
    return [Window(k, s, p, p, d) for k, s, p, d in zip(kernels, steps, pads, holes, strict=True)]


def _pool_of_parts(call: Call, input: Operand, n: int) -> Spec | None:
    """Pooling with sharded spatial dims."""
    windows = _pool_windows(call, n) if call.name in (f"max_pool{n}d", f"avg_pool{n}d") else None
    first = input.ndim - n
    if windows is None or not all(input.shape):
        return None
    slides = {first + i: window for i, window in enumerate(windows)}
    shape = tuple(slides[d].outputs(size) if d in slides else size for d, size in enumerate(input.shape))
    if min(shape) < 1:
        return None

    def localize(chosen: Chosen) -> LocalFunction:
        halo = plan_halo(chosen.ins[0], chosen.outs[0], slides, chosen.sharded)
        out = tuple(chosen.outs[0].local_shape)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x = loc[0] if loc else kw["input"]
            lowest = 0.0 if "avg" in call.name else loser(x.dtype, "max")
            around = halo.around(x, lowest)
            if not math.prod(out):
                return tied_to(around.new_zeros(out), around)
            positional = [around, *loc[1:_PADDING], *[0 for _ in loc[_PADDING : _PADDING + 1]], *loc[_PADDING + 1 :]]
            return func(*positional, **{k: v for k, v in kw.items() if k not in ("input", "padding")})

        return run

    return within(input, (), shape, linear=[(0,)] if "avg" in call.name else [], localize=localize)


_PADDING = 3  # the position of this argument; set to 0, because the halo has padded already


@rule("interpolate", "upsample")
def interpolate(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec | None:
    """Every mode is a weighted sum of neighbours, so terms pass."""
    return touching(call, input, range(2, input.ndim), linear=True) if input.ndim > 2 else None


@rule("pad")
def pad(call: Call, input: Operand, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Spec | None:
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        return None
    touched = {input.ndim - 1 - i // 2 for i, n in enumerate(pad) if n}
    if mode != "constant":
        # These modes take the number of spatial dims from the number of dims.
        touched.update(range(input.ndim - len(pad) // 2, input.ndim))
    constant = mode == "constant"
    return touching(call, input, touched, linear=not constant or not value, keeps_terms=constant)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def rearrange(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec | None:
    if input.ndim < 3:
        return None
    first = 1 if "channel" in call.name else input.ndim - 3
    return touching(call, input, range(first, input.ndim), linear=True, moves_only=True)


@rule("im2col", "col2im")
def columns(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec | None:
    """Patches as columns and back: samples may be sharded. The number of dims changes, so the spec is written out."""
    batched = input.ndim == (4 if call.name == "im2col" else 3)
    shapes = shapes_of_results(call) if batched else None
    if shapes is None:
        return None
    out: Dims = (0, *(None,) * (len(shapes[0]) - 1))
    return Spec([(0, *(None,) * (input.ndim - 1))], [out], shapes, linear=[(0,)], never_empty=True)


@rule("grid_sampler", "grid_sample")
def grid_sample(call: Call, input: Operand, grid: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    shapes = shapes_of_results(call) if call.operands == [input, grid] and all(input.shape) else None
    if shapes is None:
        return None
    closed = "_" * (input.ndim - 2)
    spec = loops(f"nc{closed}, n{closed}_ -> nc{closed}", linear=[(0,)]).spec(call.operands, shapes)
    return None if spec is None else replace(spec, never_empty=True)


@rule("unfold")
def unfold(call: Call, input: Operand, dimension: int, size: int, step: int) -> Spec | None:
    """`Tensor.unfold`, windows of a dim as a new last dim. `F.unfold` runs its own body, which calls im2col."""
    if not -input.ndim <= dimension < input.ndim or step <= 0 or not 0 <= size <= input.shape[dimension]:
        return None
    d = dimension % input.ndim
    factors: Dims = tuple(None if i == d else i for i in range(input.ndim))
    count = (input.shape[d] - size) // step + 1
    shape = (*(count if i == d else n for i, n in enumerate(input.shape)), size)
    return Spec([factors], [(*factors, None)], [shape], linear=[(0,)], moves_only=True, is_view=True)


_TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@rule(*(f"fft_{kind}{dims}" for kind in _TRANSFORMS for dims in ("", "2", "n")))
def transform(
    call: Call, input: Operand, n: Any = None, dim: Any = (), norm: Any = None, *, s: Any = None
) -> Spec | None:
    """Fourier transforms; `n` is the size of one dim, `s` those of several."""
    if dim == ():
        dim = -1 if call.name.endswith("t") else (-2, -1) if call.name.endswith("2") else None
    sizes = n if s is None else s
    if dim is None:
        dim = range(-(input.ndim if sizes is None else len([sizes] if isinstance(sizes, int) else sizes)), 0)
    named = {norm_dim(d, input.ndim) for d in ([dim] if isinstance(dim, int) else dim)}
    return touching(call, input, named, linear=True, keeps_terms=True) if input.ndim else None
