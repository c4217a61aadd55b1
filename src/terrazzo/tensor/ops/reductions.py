"""Reductions: the reduced dims are loops that the output lacks; along them shards give terms.

A mean is a sum of terms already divided by the global count, so that uneven shards count by their size. Reductions
that no single term-wise operation joins (variance, norms, logsumexp) are decomposed where a reduced dim is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from terrazzo.layout import Partial, Shard
from terrazzo.tensor.dispatch.spec import Call, Chosen, LocalFunction, Operand, Spec
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


def reduced_dims(dim: Any, ndim: int) -> tuple[int, ...] | None:
    """The dims that `dim` (None, int or sequence) names, counted from the front; None when it is something else."""
    if dim is None:
        return tuple(range(ndim))
    named = [dim] if isinstance(dim, int) else dim
    if not isinstance(named, (list, tuple)) or not all(isinstance(d, int) for d in named):
        return None
    return tuple(norm_dim(d, ndim) for d in named) if named else tuple(range(ndim))


def reduction(
    input: Operand,
    dims: Sequence[int],
    keepdim: bool,
    op: str | None,
    *,
    linear: bool = False,
    outs: int = 1,
    localize: Any = None,
) -> Spec:
    """The spec of reducing `dims`; with `op=None` they must be whole on every rank."""
    gone = set(dims) if input.ndim else set()
    factors = tuple(range(input.ndim))
    if keepdim:
        out = tuple(None if d in gone else d for d in factors)
        shape = tuple(1 if d in gone else n for d, n in enumerate(input.shape))
    else:
        out = tuple(d for d in factors if d not in gone)
        shape = tuple(n for d, n in enumerate(input.shape) if d not in gone)
    return Spec(
        [factors],
        [out] * outs,
        [shape] * outs,
        reduce={} if op is None else dict.fromkeys(gone, op),
        whole=frozenset(gone) if op is None else frozenset(),
        linear=[(0,)] if linear else [],
        localize=localize,
    )


@rule("sum")
def sum_(call: Call, input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if dims is None else reduction(input, dims, keepdim, "sum", linear=True)


@rule("nansum", "count_nonzero")
def nansum(call: Call, input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if dims is None else reduction(input, dims, keepdim, "sum")


@rule("mean")
def mean(call: Call, input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    if dims is None:
        return None
    count = prod(input.shape[d] for d in dims) if input.ndim else 1

    def localize(chosen: Chosen) -> LocalFunction | None:
        if not any(d in chosen.sharded for d in dims):
            return None

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x = loc[0] if dtype is None else loc[0].to(dtype)
            if not (x.is_floating_point() or x.is_complex()):
                func(x[:0], **kw)  # the error for integers is the operation's own
            return torch.sum(x, dims, keepdim=keepdim) / count

        return run

    return reduction(input, dims, keepdim, "sum", linear=True, localize=localize)


@rule("amax", "amin")
def amax(call: Call, input: Operand, dim: Any = (), keepdim: bool = False) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    if dims is None:
        return None
    return _extreme(input, dims, keepdim, call.name[1:])


@rule("max", "min")
def max_(call: Call, input: Operand, dim: Any = None, keepdim: bool = False) -> Spec | None:
    if isinstance(dim, Operand):
        return None
    if dim is None:
        # The gradient of a full max goes to all ties alike, as amax's does.
        return _extreme(input, tuple(range(input.ndim)), False, call.name)
    dims = reduced_dims(dim, input.ndim)
    # Along a cut dim the ranks exchange what each of them found: see `places`.
    return None if dims is None or is_cut(input, dims) else reduction(input, dims, keepdim, None, outs=2)


def _extreme(input: Operand, dims: Sequence[int], keepdim: bool, op: str) -> Spec:
    """Max and min along sharded dims; a rank with an empty shard takes part with a value that never wins."""

    def localize(chosen: Chosen) -> LocalFunction | None:
        if not any(d in chosen.sharded and chosen.ins[0].local_shape[d] == 0 for d in dims):
            return None
        shape = tuple(chosen.outs[0].local_shape)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x: torch.Tensor = loc[0] if loc else kw["input"]
            result = torch.full(shape, loser(x.dtype, op), dtype=x.dtype, device=x.device)
            # Part of the graph: the other ranks' backward communicates with this one's.
            return result + x.sum().to(x.dtype) if x.requires_grad else result

        return run

    whole = any(input.shape[d] == 0 for d in dims) if input.ndim else False
    return reduction(input, dims, keepdim, None if whole else op, localize=localize)


def loser(dtype: torch.dtype, op: str) -> Any:
    """The value that never wins a `max` or `min`."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


@rule("prod")
def prod_(call: Call, input: Operand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if dims is None else reduction(input, dims, keepdim, "product")


@rule("all", "any")
def all_(call: Call, input: Operand, dim: Any = None, keepdim: bool = False) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if dims is None else reduction(input, dims, keepdim, "min" if call.name == "all" else "max")


def _along(input: Operand, dim: int, outs: int = 1) -> Spec | None:
    """A function of whole rows along `dim` that keeps the shape."""
    factors = tuple(range(input.ndim))
    return Spec([factors], [factors] * outs, [input.shape] * outs, whole=frozenset((dim,)))


@rule("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "cummax", "cummin")
def scan(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    dim = kwargs.get("dim", args[0] if args else (-1 if call.name in ("sort", "argsort") else None))
    if isinstance(dim, bool) or not isinstance(dim, int) or not input.ndim:
        return None
    return _along(input, norm_dim(dim, input.ndim), 2 if call.name in ("sort", "cummax", "cummin") else 1)


@rule("topk")
def topk(call: Call, input: Operand, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Spec | None:
    if not isinstance(k, int) or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    factors = tuple(range(input.ndim))
    out = tuple(None if f == d else f for f in factors)
    shape = tuple(k if i == d else n for i, n in enumerate(input.shape))
    return Spec([factors], [out] * 2, [shape] * 2, whole=frozenset((d,)))


def is_cut(input: Any, dims: Sequence[int]) -> bool:
    """Whether a reduction along `dims` meets a shard or terms there, so that no rank can do it alone."""
    return any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim in dims) for p in input.placements)


def _reduce_args(x: Any, dim: Any) -> tuple[int, ...] | None:
    dims = reduced_dims(dim, x.ndim)
    return dims if dims is not None and x.ndim and is_cut(x, dims) else None


def _root_of_terms(total: Any, exponent: float) -> Any:
    """`total ** exponent` with gradient 0 where total is 0, as PyTorch's norms have it."""
    zero = total == 0
    return torch.where(zero, torch.zeros_like(total), torch.where(zero, torch.ones_like(total), total) ** exponent)


@decomposition("linalg_vector_norm")
def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = _reduce_args(x, dim)
    if dims is None or not x.is_floating_point():
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    if ord == 2:
        return _root_of_terms((x * x).sum(dims, keepdim).redistribute(), 0.5)
    if ord in (float("inf"), float("-inf")):
        size = x.abs()
        return size.amax(dims, keepdim) if ord > 0 else size.amin(dims, keepdim)
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    if ord == 0:
        # Part of the graph, with gradient 0, as PyTorch has it.
        return torch.where(x == 0, x * 0, torch.ones_like(x)).sum(dims, keepdim)
    return _root_of_terms((x.abs() ** ord).sum(dims, keepdim).redistribute(), 1.0 / ord)


@decomposition("norm")
def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    if not isinstance(p, (int, float)) or out is not None:
        return NotImplemented
    return vector_norm(x, p, dim, keepdim, dtype=dtype)


def _moments(x: Any, dims: tuple[int, ...], correction: float, keepdim: bool) -> tuple[Any, Any]:
    center = x.mean(dims, keepdim=True).redistribute()
    count = prod(x.shape[d] for d in dims)
    deviation = x - center
    variance = (deviation * deviation).sum(dims, keepdim).redistribute() / max(count - correction, 0)
    return variance, center if keepdim else center.reshape(variance.shape)


def _moments_of_call(x: Any, dim: Any, unbiased: Any, correction: Any, keepdim: bool) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = _reduce_args(x, dim)
    if dims is None or not x.is_floating_point():
        return NotImplemented
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    if prod(x.shape[d] for d in dims) - correction <= 0:
        return NotImplemented
    return _moments(x, dims, correction, keepdim)


@decomposition("var")
def var(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    found = _moments_of_call(x, dim, unbiased, correction, keepdim)
    return found if found is NotImplemented else found[0]


@decomposition("std")
def std(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    found = _moments_of_call(x, dim, unbiased, correction, keepdim)
    return found if found is NotImplemented else _root_of_terms(found[0], 0.5)


@decomposition("var_mean")
def var_mean(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    return _moments_of_call(x, dim, unbiased, correction, keepdim)


@decomposition("std_mean")
def std_mean(x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    found = _moments_of_call(x, dim, unbiased, correction, keepdim)
    return found if found is NotImplemented else (_root_of_terms(found[0], 0.5), found[1])
