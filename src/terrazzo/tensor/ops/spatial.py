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
    call: Call,
    input: Operand,
    touched: Collection[int],
    *,
    linear: bool = False,
    moves_only: bool = False,
    keeps_terms: bool = False,
) -> Spec | None:
    """The spec of a function that works within the dims `touched` and keeps the others where they are."""
    shapes = shapes_of_results(call)
    if shapes is None:
        return None
    factors: Dims = tuple(None if d in touched else d for d in range(input.ndim))
    if any(
        len(shape) != input.ndim
        or any(n != m for n, m, f in zip(shape, input.shape, factors, strict=True) if f is not None)
        for shape in shapes
    ):
        return None

    return Spec(
        [factors],
        [factors] * len(shapes),
        shapes,
        linear=[(0,)] if linear else [],
        moves_only=moves_only,
        keeps_terms=keeps_terms,
        never_empty=True,
    )


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


def _max_windows(
    n: int, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> list[Window] | None:  # fmt: skip
    if ceil_mode or return_indices:
        return None
    return _pool_windows(n, kernel_size, stride, padding, dilation)


def _average_windows(
    n: int, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> list[Window] | None:  # fmt: skip
    windows = None if ceil_mode else _pool_windows(n, kernel_size, stride, padding, 1)
    # If padding is not counted, windows at the ends have fewer elements than the halo would count.
    return windows if windows is not None and (count_include_pad or not any(w.before for w in windows)) else None


def _pool_windows(n: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[Window] | None:
    """The window of each dim; None for arguments that PyTorch will refuse."""
    kernels, pads, holes = each(kernel, n), each(padding, n), each(dilation, n)
    steps = kernels if stride is None or stride == () or stride == [] else each(stride, n)
    if min((*kernels, *steps, *holes)) < 1 or any(not 0 <= 2 * p <= k for p, k in zip(pads, kernels, strict=True)):
        return None
    return [Window(k, s, p, p, d) for k, s, p, d in zip(kernels, steps, pads, holes, strict=True)]


def _pool_of_parts(call: Call, input: Operand, n: int) -> Spec | None:
    """Pooling with sharded spatial dims."""
    kinds = {f"max_pool{n}d": _max_windows, f"avg_pool{n}d": _average_windows}
    if call.name not in kinds:
        return None
    windows = kinds[call.name](n, *call.args, **call.kwargs)
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
            result: torch.Tensor = func(*positional, **{k: v for k, v in kw.items() if k not in ("input", "padding")})
            return result

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
