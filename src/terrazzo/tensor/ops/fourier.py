"""Fourier transforms: the transformed dims stay whole, other dims may be sharded; they are linear, so terms pass."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.dispatch.spec import Call, Operand, Spec
from terrazzo.tensor.ops.spatial import touching
from terrazzo.tensor.ops.table import body, rule
from terrazzo.tensor.ops.views import norm_dim

body("fft_fftshift", "fft_ifftshift")

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@rule(*(f"fft_{kind}{dims}" for kind in _KINDS for dims in ("", "2", "n")))
def transform(
    call: Call, input: Operand, n: Any = None, dim: Any = (), norm: Any = None, *, s: Any = None
) -> Spec | None:
    """`n` is the size of one dim, `s` those of several."""
    if dim == ():
        dim = -1 if call.name.endswith("t") else (-2, -1) if call.name.endswith("2") else None
    sizes = n if s is None else s
    if dim is None:
        dim = range(-(input.ndim if sizes is None else len([sizes] if isinstance(sizes, int) else sizes)), 0)
    named = {norm_dim(d, input.ndim) for d in ([dim] if isinstance(dim, int) else dim)}
    return touching(call, input, named, linear=True, keeps_terms=True) if input.ndim else None
