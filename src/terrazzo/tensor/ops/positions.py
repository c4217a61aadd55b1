"""Positions in a tensor: argmax, argmin, max and min with indices, medians, quantiles.

Along a sharded dim little is sent: each rank sends its largest element and its index in the global tensor. Of equal
elements the first wins, as on one device. Functions that need all elements in order need whole dims.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_gather
from terrazzo.layout import Layout, Shard
from terrazzo.tensor.dispatch.outside_mesh import not_known
from terrazzo.tensor.dispatch.spec import Call, Dims, Ints, Operand, Spec, Static
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.loops import loops
from terrazzo.tensor.ops.questions import in_boxes, is_cut, without_dims
from terrazzo.tensor.ops.reductions import loser, reduced_dims, reduction
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


@rule("argmax", "argmin")
def argmax(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    return None if is_cut(input, dims) else reduction(input, dims, keepdim, None)


@rule("median", "nanmedian")
def median(call: Call, input: Operand, dim: Ints = None, keepdim: bool = False) -> Spec:
    return reduction(input, reduced_dims(dim, input.ndim), keepdim, None, outs=1 if dim is None else 2)


@rule("mode")
def mode(call: Call, input: Operand, dim: Ints = -1, keepdim: bool = False) -> Spec:
    return reduction(input, reduced_dims(dim, input.ndim), keepdim, None, outs=2)


@rule("kthvalue")
def kthvalue(call: Call, input: Operand, k: int, dim: Ints = -1, keepdim: bool = False) -> Spec:
    return reduction(input, reduced_dims(dim, input.ndim), keepdim, None, outs=2)


@rule("quantile", "nanquantile")
def quantile(
    call: Call, input: Operand, q: Any, dim: Ints = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Spec | None:
    dims = reduced_dims(dim, input.ndim)
    if not isinstance(q, (int, float, Operand)):
        return None
    spec = reduction(input, dims, keepdim, None)
    spec.never_empty = True  # PyTorch refuses quantiles of a tensor without rows
    if not isinstance(q, Operand):
        return spec
    if q.ndim > 1 or len(call.operands) != 2:
        return None
    # The quantiles are along a new first dim.
    lead: Dims = (None,) * q.ndim
    shape = (*q.shape, *spec.shapes[0])
    return Spec([*spec.ins, lead], [(*lead, *spec.outs[0])], [shape], whole=frozenset(dims), never_empty=True)


@decomposition("aminmax")
def aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    dims = () if dim is None else dim
    return torch.return_types.aminmax((input.amin(dims, keepdim), input.amax(dims, keepdim)))


@decomposition("argmax")
def argmax_of_shards(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _argument(input, "max", dim, keepdim)


@decomposition("argmin")
def argmin_of_shards(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _argument(input, "min", dim, keepdim)


@decomposition("max")
def max_of_shards(input: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    """Along a sharded dim, or of two tensors; other calls have a rule."""
    return _extreme(input, "max", named.get("other", dim), keepdim)


@decomposition("min")
def min_of_shards(input: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    return _extreme(input, "min", named.get("other", dim), keepdim)


def _extreme(input: Any, op: str, dim: Any, keepdim: bool) -> Any:
    if isinstance(dim, torch.Tensor):
        return torch.maximum(input, dim) if op == "max" else torch.minimum(input, dim)
    if not isinstance(dim, int) or isinstance(dim, bool) or not input.ndim or not input.numel():
        return NotImplemented
    x = _inside(input, op)
    d = norm_dim(dim, x.ndim)
    value, place = _find(x, op, d)
    layout = without_dims(x._layout, (d,))
    if x._local.requires_grad and torch.is_grad_enabled():
        value = _in_graph(x._local, value, place - x._layout.box().offsets[d], d)
    shape = layout.local_shape
    found: tuple[Any, Any] = wrap(value.reshape(shape), layout), wrap(place.reshape(shape), layout)
    if keepdim:
        found = found[0].unsqueeze(d), found[1].unsqueeze(d)
    kinds: Any = torch.return_types
    return (kinds.max if op == "max" else kinds.min)(found)


def _argument(input: Any, op: str, dim: Any, keepdim: bool) -> Any:
    if input.dtype == torch.bool:
        raise RuntimeError(f"arg{op}(): does not support bool input")  # as on one device
    if not (dim is None or isinstance(dim, int)) or not input.ndim or not input.numel():
        return NotImplemented
    x = _inside(input, f"arg{op}")
    d = None if dim is None else norm_dim(dim, x.ndim)
    _, place = _find(x, op, d)
    dims = tuple(range(x.ndim)) if d is None else (d,)
    layout = without_dims(x._layout, dims)
    result = wrap(place.reshape(layout.local_shape), layout)
    if not keepdim:
        return result
    return result.reshape((1,) * x.ndim) if d is None else result.unsqueeze(d)


def _inside(x: DTensor, name: str) -> DTensor:
    """The tensor as boxes, without terms; raises on a rank outside its mesh."""
    if x._layout.coord is None:
        raise not_known(name, x._layout.mesh)
    return in_boxes(x)


def _find(x: DTensor, op: str, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme along `dim` (None: of all elements) and its global index, on every rank that shards `dim`."""
    layout, local = x._layout, x._local.detach()
    dims = tuple(range(layout.ndim)) if dim is None else (dim,)
    value, place = _find_own(local, layout, op, dim)
    for m in reversed(layout.order):
        p = layout.placements[m]
        axis = axis_of(layout.mesh, m)
        if axis.size == 1 or not isinstance(p, Shard) or p.dim not in dims:
            continue
        one_each = (1,) * axis.size
        values = all_gather(value.unsqueeze(0), axis, 0, one_each)
        places = all_gather(place.unsqueeze(0), axis, 0, one_each)
        value = values.amax(0) if op == "max" else values.amin(0)
        wins = values == value
        if values.is_floating_point():
            wins |= values.isnan()  # a NaN is the extreme, as on one device
        place = places.masked_fill(~wins, torch.iinfo(torch.int64).max).amin(0)
    return value, place


def _find_own(local: torch.Tensor, layout: Layout, op: str, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`_find` in this rank's part only; an empty part never wins."""
    box = layout.box()
    length = local.numel() if dim is None else local.shape[dim]
    if not length:
        shape = [] if dim is None else [n for d, n in enumerate(local.shape) if d != dim]
        value = torch.full(shape, loser(local.dtype, op), dtype=local.dtype, device=local.device)
        return value, torch.full(shape, torch.iinfo(torch.int64).max, dtype=torch.int64, device=local.device)
    ordered = local.to(torch.uint8) if local.dtype == torch.bool else local
    find = torch.argmax if op == "max" else torch.argmin
    if dim is not None:
        at = find(ordered, dim, keepdim=True)
        return local.gather(dim, at).squeeze(dim), at.squeeze(dim) + box.offsets[dim]
    at = find(ordered)
    place = torch.zeros_like(at)
    rest, step = at.clone(), 1
    for d in reversed(range(layout.ndim)):
        place += (rest % box.lengths[d] + box.offsets[d]) * step
        rest //= box.lengths[d]
        step *= layout.shape[d]
    return local.reshape(-1)[at], place


def _in_graph(local: torch.Tensor, value: torch.Tensor, own: torch.Tensor, d: int) -> torch.Tensor:
    """The extremes, whose gradients go to the rank and the index (`own`, counted in its part) where they were found."""
    here = (own >= 0) & (own < local.shape[d])
    if not local.shape[d]:
        return tied_to(value, local)
    return torch.where(here, local.gather(d, own.masked_fill(~here, 0).unsqueeze(d)).squeeze(d), value)


# ------------------------------------------------------------------ values in a list that every rank has whole


_ONE_LIST, _LISTS = loops("_, ... -> ..."), loops("..._, ...m -> ...m")


@rule("searchsorted")
def searchsorted(call: Call, sorted_sequence: Operand, input: Any, *args: Any, **kwargs: Any) -> Spec | None:
    """One list for all, or one for each row."""
    if call.operands != [sorted_sequence, input] or kwargs.get("sorter") is not None:
        return None
    if sorted_sequence.ndim == 1:
        return _ONE_LIST.spec(call.operands)
    return _LISTS.spec(call.operands) if sorted_sequence.shape[:-1] == input.shape[:-1] else None


@rule("bucketize")
def bucketize(call: Call, input: Any, boundaries: Any, *args: Any, **kwargs: Any) -> Spec | None:
    return loops("..., _ -> ...").spec(call.operands) if call.operands == [input, boundaries] else None


@rule("isin")
def isin(call: Call, elements: Operand, test_elements: Any, *args: Static, **kwargs: Static) -> Spec:
    factors: Dims = tuple(range(elements.ndim))
    ins: list[Dims] = [factors, *[(None,) * o.ndim for o in call.operands[1:]]]
    return Spec(ins, [factors], [elements.shape])
