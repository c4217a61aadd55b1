"""Reductions: the reduced dims are loops that the output does not have; where they are sharded, results are partial.

A mean is a sum of terms that are divided by the global count, so that uneven shards have the right weight. Reductions
that no elementwise reduction of terms can combine (variance, norms) are combined at once where a reduced dim is
sharded; sums of half types are reduced in float32 (`accumulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from terrazzo.comm.differentiable import cast, reduce_extreme, reduce_replicate
from terrazzo.tensor.dispatch.spec import HALF, Call, Chosen, Ints, Joined, LocalFunction, Operand, Spec, within
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.ops.accumulate import (
    axis_of_terms,
    given_type,
    in_working_type,
    join_norms,
    norm_of_nothing,
    root,
    sums_in_single,
    with_dtype,
    working_type,
)
from terrazzo.tensor.ops.questions import is_cut
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


def reduced_dims(dim: Ints, ndim: int) -> tuple[int, ...]:
    """The dims that `dim` names, as nonnegative numbers; an empty list names all, too."""
    named = [dim] if isinstance(dim, int) else dim
    return tuple(norm_dim(d, ndim) for d in named or range(ndim))


def reduction(
    input: Operand,
    dims: Sequence[int],
    keepdim: bool,
    op: str | None,
    *,
    linear: bool = False,
    outs: int = 1,
    localize: Any = None,
    joined: Any = None,
) -> Spec:
    """The spec of reducing `dims`; with `op=None` these must be whole on every rank."""
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
        joined=joined,
    )


@rule("sum")
def sum_(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    dims = reduced_dims(dim, input.ndim)
    linear = dtype is None or dtype.is_floating_point or dtype.is_complex  # elements are rounded to integers before
    return reduction(input, dims, keepdim, "sum", linear=linear, joined=sums_in_single(with_dtype))


_JOINED_BY = {"count_nonzero": "sum", "nansum": "sum", "prod": "product", "all": "min", "any": "max"}


@rule(*_JOINED_BY)
def joined(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    dims = reduced_dims(dim, input.ndim)
    in_single = sums_in_single(with_dtype) if call.name in ("nansum", "prod") else None
    return reduction(input, dims, keepdim, _JOINED_BY[call.name], joined=in_single)


@rule("mean")
def mean(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    dims = reduced_dims(dim, input.ndim)
    count = prod(input.shape[d] for d in dims) if input.ndim else 1

    def localize(chosen: Chosen) -> LocalFunction | None:
        if not any(d in chosen.sharded for d in dims):
            return None

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x = _input_of(loc, kw)
            x = x if dtype is None else x.to(dtype)
            if not (x.is_floating_point() or x.is_complex()):
                func(x[:0], **kw)  # raises the operation's own error for integers
            return torch.sum(x, dims, keepdim=keepdim) / count

        return run

    def in_single(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        x = _input_of(loc, kw)
        x = x if dtype is None else x.to(dtype)
        return torch.sum(x, dims, keepdim=keepdim, dtype=torch.float32) / count

    joined = sums_in_single(in_single)
    return reduction(input, dims, keepdim, "sum", linear=True, localize=localize, joined=joined)


@rule("amax", "amin")
def amax(call: Call, input: Operand, dim: Ints = (), keepdim: bool = False) -> Spec:
    return _extreme(input, reduced_dims(dim, input.ndim), keepdim, call.name[1:])


@rule("max", "min")
def max_(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False) -> Spec | None:
    if dim is None:
        # The gradient of a max of all elements is shared by all ties, as in amax.
        return _extreme(input, tuple(range(input.ndim)), False, call.name)
    dims = reduced_dims(dim, input.ndim)
    # Along a sharded dim `positions` computes it.
    return None if is_cut(input, dims) else reduction(input, dims, keepdim, None, outs=2)


def _extreme(input: Operand, dims: Sequence[int], keepdim: bool, op: str) -> Spec:
    """Max and min along sharded dims; an empty shard contributes a value that never wins.

    Terms do not know how many elements tie, so where a gradient is wanted the ranks join what they found at once.
    """

    def localize(chosen: Chosen) -> LocalFunction | None:
        if not any(d in chosen.sharded and chosen.ins[0].local_shape[d] == 0 for d in dims):
            return None
        shape = tuple(chosen.outs[0].local_shape)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x = _input_of(loc, kw)
            return tied_to(torch.full(shape, loser(x.dtype, op), dtype=x.dtype, device=x.device), x)

        return run

    def make(chosen: Chosen) -> Joined:
        alone = None if chosen.ins[0].coord is None else localize(chosen)  # outside of the mesh nothing runs

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            x, axis = _input_of(loc, kw), axis_of_terms(chosen.outs[0])
            found: torch.Tensor = func(*loc, **kw) if alone is None else alone(func, loc, kw)
            return found if axis.size == 1 else reduce_extreme(found, axis, op, _ties(x.detach(), found, dims))

        return Joined(run, half_only=False)

    whole = any(input.shape[d] == 0 for d in dims) if input.ndim else False
    spec = reduction(input, dims, keepdim, None if whole else op, localize=localize)
    if not whole and not input.layout.is_replicated:
        spec.guard, spec.otherwise = _without_gradient, replace(spec, joined=make)
    return spec


def _without_gradient(loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
    return not torch.is_grad_enabled() or not (loc[0] if loc else kw["input"]).requires_grad


def _ties(x: torch.Tensor, found: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """How many elements of each row of `dims` are the extreme that was found in it."""
    rows = found.detach().reshape([1 if d in dims else n for d, n in enumerate(x.shape)])
    return (x == rows).sum(tuple(dims)).reshape(found.shape)


def loser(dtype: torch.dtype, op: str) -> Any:
    """The value that never wins a `max` or `min`."""
    if dtype.is_complex:
        raise NotImplementedError(f"values of {dtype} cannot be ordered, so {op} is not defined for them")
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


@rule("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "cummax", "cummin")
def scan(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    dim = kwargs.get("dim", args[0] if args else (-1 if call.name in ("sort", "argsort") else None))
    if isinstance(dim, bool) or not isinstance(dim, int) or not input.ndim:
        return None
    outs = 2 if call.name in ("sort", "cummax", "cummin") else 1
    return within(input, (norm_dim(dim, input.ndim),), outs=outs)


@rule("topk")
def topk(call: Call, input: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Spec | None:
    if not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    return within(input, (d,), [k if i == d else n for i, n in enumerate(input.shape)], outs=2)


def _cut_reduction(
    input: Operand, dims: tuple[int, ...], keepdim: bool, make: Callable[[Chosen], Joined], outs: int = 1
) -> Spec:
    """A reduction without partial results: `make` reduces and combines where a reduced dim is sharded.

    Elsewhere, and where nothing is reduced, the caller's own function runs on whole rows.
    """
    whole = not input.ndim or prod(input.shape[d] for d in dims) == 0
    spec = reduction(input, dims, keepdim, None if whole else "sum", outs=outs, localize=lambda chosen: None)
    spec.joined = make
    return spec


def _input_of(loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    return loc[0] if loc else kw["input"]


@rule("linalg_vector_norm")
def vector_norm(
    call: Call, x: Operand, ord: Any = 2, dim: Ints = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec | None:
    """The norm, from the norms of each rank's part."""
    dims = reduced_dims(dim, x.ndim)
    if isinstance(ord, bool) or not isinstance(ord, (int, float)):
        return None
    order = float(ord)

    def make(chosen: Chosen) -> Joined:
        out = chosen.outs[0]
        shape = chosen.ins[0].local_shape
        empty = prod(shape) == 0

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            local, axis = _input_of(loc, kw), axis_of_terms(out)
            if axis.size == 1 or not (local.is_floating_point() or local.is_complex()):
                return func(*loc, **kw)  # raises the operation's own error for integers
            result = given_type(func, loc, kw) if dtype is None else dtype
            if empty:
                real = working_type(result).to_real()
                norms = torch.full(out.local_shape, norm_of_nothing(order), dtype=real, device=local.device)
                norms = tied_to(norms, local)
            else:
                wide = working_type(result) if local.dtype in HALF else dtype
                norms = torch.linalg.vector_norm(local, order, dims, keepdim, dtype=wide)
            if abs(order) == float("inf") and not _without_gradient([norms], {}):
                ties = _ties(local.detach().abs(), norms, dims)
                return reduce_extreme(norms, axis, "max" if order > 0 else "min", ties).to(result.to_real())
            return join_norms(norms, order, axis).to(result.to_real())

        return Joined(run, half_only=False)

    return _cut_reduction(x, dims, keepdim, make)


@rule("norm")
def norm(
    call: Call, input: Operand, p: Any = 2, dim: Ints = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Spec | None:
    if isinstance(out, torch.dtype):  # Tensor.norm has no `out`
        dtype = out
    if p == "fro" and dim is not None and len(reduced_dims(dim, input.ndim)) > 2:
        return None
    return vector_norm(call, input, 2 if p == "fro" else p, dim, keepdim, dtype=dtype)


@decomposition("linalg_norm")
def linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord is not None and ((dim is None and x.ndim == 2) or (isinstance(dim, (tuple, list)) and len(dim) == 2)):
        return matrix_norm(x, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)
    if isinstance(ord, str) or (ord is not None and dim is None and x.ndim != 1):
        return NotImplemented
    if ord is None and dim is None and keepdim:
        dim = tuple(range(x.ndim))
    return torch.linalg.vector_norm(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@decomposition("linalg_matrix_norm")
def matrix_norm(x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The matrix norms that need no singular values."""
    if not isinstance(dim, (tuple, list)) or len(dim) != 2 or x.ndim < 2:
        return NotImplemented
    rows, columns = (norm_dim(d, x.ndim) for d in dim)
    if rows == columns:
        return NotImplemented
    if ord == "fro":
        return torch.linalg.vector_norm(x, 2, (rows, columns), keepdim, dtype=dtype)
    if not isinstance(ord, (int, float)) or abs(ord) not in (1, float("inf")):
        return NotImplemented
    summed, kept = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = torch.linalg.vector_norm(x, 1, summed, True, dtype=dtype)
    result = torch.amax(sums, kept, True) if ord > 0 else torch.amin(sums, kept, True)
    return result if keepdim else result.squeeze((rows, columns))


@rule("var", "std", "var_mean", "std_mean")
def moments(
    call: Call, input: Operand, dim: bool | Ints = None, unbiased: Any = None, keepdim: bool = False, *,
    correction: Any = None,
) -> Spec:  # fmt: skip
    """Variance and mean from each rank's own moments, corrected by the distance of its mean from the global one."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(dim, input.ndim)
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    outs = 2 if call.name.endswith("_mean") else 1
    count = prod(input.shape[d] for d in dims)
    if count <= correction:
        return reduction(input, dims, keepdim, None, outs=outs)

    def make(chosen: Chosen) -> Joined:
        out = chosen.outs[0]
        mine = prod(chosen.ins[0].box().lengths[d] for d in dims)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
            local, axis = _input_of(loc, kw), axis_of_terms(out)
            if axis.size == 1 or not (local.is_floating_point() or local.is_complex()):
                return func(*loc, **kw)  # raises the operation's own error for integers
            x = in_working_type(local)
            if mine:
                variance, center = torch.var_mean(x, dims, correction=0, keepdim=True)
            else:
                center = x.sum(dims, keepdim=True)
                variance = center.abs()
            mean = reduce_replicate(center * (mine / count), axis)
            offset = (center - cast(mean, axis)).abs()
            share = mine / (count - correction)
            variance = reduce_replicate((variance + offset * offset) * share, axis)
            spread = root(variance) if call.name.startswith("std") else variance
            results = [t if keepdim else t.squeeze(dims) for t in (spread, mean)[:outs]]
            rounded = [t.to(t.dtype if local.dtype not in HALF else local.dtype) for t in results]
            return tuple(rounded) if outs == 2 else rounded[0]

        return Joined(run, half_only=False)

    return _cut_reduction(input, dims, keepdim, make, outs)
