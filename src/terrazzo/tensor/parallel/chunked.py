"""Linear layers that communicate in chunks, while others are computed (asynchronous tensor parallelism).

A column-wise layer gathers its input, which is sharded along the sequence, and a row-wise layer reduce-scatters its
output along it. In chunks of each rank's positions, one is on its way while another is multiplied, in backward, too:
there the column-wise layer scatters the gradient of its input, and computes the weight's meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from terrazzo.comm import differentiable as typed
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import all_gather_start, reduce_scatter_start
from terrazzo.comm.pending import Pending
from terrazzo.layout import Layout, Shard
from terrazzo.tensor.dtensor import DTensor, wrap


def gathers_in_chunks(module: nn.Linear, x: Any, chunks: int) -> DTensor | None:
    """The column-wise layer's output for an input that is sharded along a dim; None where that cannot be."""
    found = _along(module, x)
    if found is None:
        return None
    dim, axis = found
    weight: Any = module.weight
    bias: Any = module.bias
    y = _GatherLinear.apply(*_cast(x._local, weight._local, None if bias is None else bias._local), axis, dim, chunks)
    return wrap(y, Layout.of(x.device_mesh, [Shard(x.ndim - 1)], (*x.shape[:-1], module.out_features)))


def scatters_in_chunks(module: nn.Linear, x: Any, to: Any, chunks: int) -> DTensor | None:
    """The row-wise layer's output, sharded as `to` says, for an input that is sharded on its features; or None."""
    found = _along(module, x, to)
    if found is None or not x.placements[0].is_shard(x.ndim - 1):
        return None
    dim, axis = found
    weight: Any = module.weight
    bias: Any = module.bias
    y = _LinearScatter.apply(*_cast(x._local, weight._local), axis, dim, chunks)
    if bias is not None:
        y = y + typed.cast(bias._local, axis).to(y.dtype)  # each rank adds it to its rows
    return wrap(y, Layout.of(x.device_mesh, [Shard(dim)], (*x.shape[:-1], module.out_features)))


def _along(module: nn.Linear, x: Any, to: Any = None) -> tuple[int, Axis] | None:
    """The dim of the sequence, of which all ranks have equal parts, and the ranks; None where that is not so."""
    if not isinstance(x, DTensor) or x.device_mesh.ndim != 1 or not isinstance(module.weight, DTensor):
        return None
    placement = x.placements[0] if to is None else to
    if not isinstance(placement, Shard) or x.ndim < 2:
        return None
    dim, axis = placement.dim % x.ndim, axis_of(x.device_mesh, 0)
    fits = dim < x.ndim - 1 and axis.size > 1 and x.shape[dim] and not x.shape[dim] % axis.size
    return (dim, axis) if fits else None


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [None if t is None else t.to(torch.get_autocast_dtype(kind)) for t in tensors]


class _GatherLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int, chunks: int) -> Tensor:
        parts = x.chunk(chunks, dim)
        started = [_gather_start(part, axis, dim) for part in parts]
        gathered, results = [], []
        for each in started:
            gathered.append(each.wait())
            results.append(F.linear(gathered[-1], weight, bias))
        ctx.save_for_backward(weight, *gathered)
        ctx.rest = axis, dim, [part.shape[dim] for part in parts]
        return _in_order(results, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *gathered = ctx.saved_tensors
        axis, dim, lengths = ctx.rest
        grads = _in_chunks(grad, axis, dim, lengths)
        started = [
            reduce_scatter_start(g @ weight, axis, dim, (n,) * axis.size) for g, n in zip(grads, lengths, strict=True)
        ]
        of_weight = _of_weight(torch.cat(grads, dim), torch.cat(gathered, dim)) if ctx.needs_input_grad[1] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return torch.cat([each.wait() for each in started], dim), of_weight, of_bias, None, None, None


class _LinearScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, dim: int, chunks: int) -> Tensor:
        own = x.shape[dim] // axis.size
        size = -(-own // chunks)
        lengths = [min(size, own - at) for at in range(0, own, size)]
        ctx.save_for_backward(x, weight)
        ctx.rest = axis, dim, lengths
        started = [
            reduce_scatter_start(F.linear(part, weight), axis, dim, (n,) * axis.size)
            for part, n in zip(_in_chunks(x, axis, dim, lengths), lengths, strict=True)
        ]
        return torch.cat([each.wait() for each in started], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        axis, dim, lengths = ctx.rest
        started = [_gather_start(part, axis, dim) for part in grad.split(lengths, dim)]
        gathered, results = [], []
        for each in started:
            gathered.append(each.wait())
            results.append(gathered[-1] @ weight)
        of_weight = _of_weight(_in_order(gathered, axis, dim), x) if ctx.needs_input_grad[1] else None
        return _in_order(results, axis, dim), of_weight, None, None, None


def _gather_start(part: Tensor, axis: Axis, dim: int) -> Pending[Tensor]:
    return all_gather_start(part.contiguous(), axis, dim, (part.shape[dim],) * axis.size)


def _in_chunks(whole: Tensor, axis: Axis, dim: int, lengths: Sequence[int]) -> list[Tensor]:
    """A sequence in chunks, each with as many positions of every rank's part."""
    parts = whole.unflatten(dim, (axis.size, -1))
    return [part.flatten(dim, dim + 1) for part in parts.split(list(lengths), dim + 1)]


def _in_order(chunks: Sequence[Tensor], axis: Axis, dim: int) -> Tensor:
    """The sequence, of what `_in_chunks` makes of it."""
    return torch.cat([chunk.unflatten(dim, (axis.size, -1)) for chunk in chunks], dim + 1).flatten(dim, dim + 1)


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).mT @ x.flatten(0, -2)
