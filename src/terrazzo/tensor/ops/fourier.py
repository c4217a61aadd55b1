"""Fourier transforms: the transformed dims stay whole, other dims may be sharded; they are linear, so terms pass."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.dispatch.spec import Call, Operand, Spec, within
from terrazzo.tensor.ops.table import body, rule
from terrazzo.tensor.ops.views import norm_dim

body("fft_fftshift", "fft_ifftshift")

_HALVES = ("fft_rfft", "fft_ihfft")  # for a real input only half of the result is stored
_DOUBLES = ("fft_irfft", "fft_hfft")


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def transform(call: Call, input: Operand, n: Any = None, dim: int = -1, norm: Any = None) -> Spec | None:
    if not isinstance(dim, int) or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    return _transform(call.name, input, [d], [input.shape[d] if n is None else n], n is not None)


@rule("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2")
def transform2(call: Call, input: Operand, s: Any = None, dim: Any = (-2, -1), norm: Any = None) -> Spec | None:
    return transform_n(call, input, s, dim, norm)


@rule("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn")
def transform_n(call: Call, input: Operand, s: Any = None, dim: Any = None, norm: Any = None) -> Spec | None:
    sizes = [s] if isinstance(s, int) else s
    dims = [dim] if isinstance(dim, int) else dim
    if dims is None:
        count = input.ndim if sizes is None else len(sizes)
        dims = range(input.ndim - count, input.ndim)
    if not input.ndim or not dims or (sizes is not None and len(sizes) != len(dims)):
        return None
    dims = [norm_dim(d, input.ndim) for d in dims]
    lengths = [input.shape[d] for d in dims]
    last_given = sizes is not None and sizes[-1] != -1
    if sizes is not None:
        lengths = [n if given == -1 else given for n, given in zip(lengths, sizes, strict=True)]
    return _transform(call.name.rstrip("2n"), input, dims, lengths, last_given)


def _transform(kind: str, input: Operand, dims: list[int], lengths: list[Any], last_given: bool) -> Spec | None:
    if not all(isinstance(n, int) and n > 0 for n in lengths) or len(set(dims)) != len(dims):
        return None
    shape = list(input.shape)
    for d, n in zip(dims, lengths, strict=True):
        shape[d] = n
    if kind in _HALVES:
        shape[dims[-1]] = lengths[-1] // 2 + 1
    elif kind in _DOUBLES and not last_given:
        shape[dims[-1]] = 2 * (lengths[-1] - 1)
    if min(shape[d] for d in dims) < 1:
        return None
    return within(input, dims, shape, linear=[(0,)], keeps_terms=True, never_empty=True)
