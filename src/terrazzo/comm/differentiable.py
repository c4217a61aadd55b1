"""Differentiable collectives, to any order: the gradient of each is another one of them.

They are typed. Each maps local tensors between three ways in which the ranks of an axis can hold a value:

    replicated   every rank holds the value, and computes the same with it. Each rank has the whole gradient.
    varying      each rank holds its own value, or uses a common value differently. The terms of a partial sum are
                 varying, and so is a copy of a value that every rank uses differently.
    sharded      each rank holds one part of the value.

    forward                                         what it does             its gradient
    ----------------------------------------------  -----------------------  ------------------------
    cast                    replicated to varying   nothing                  reduce_replicate
    reduce_replicate        varying to replicated   all-reduce               cast
    slice_own               replicated to sharded   keeps its own part       gather_replicate
    slice_own               replicated to sharded   keeps the own part       gather_replicate
    gather_varying          sharded to varying      all-gather               reduce_scatter
    reduce_scatter          varying to sharded      reduce-scatter           gather_varying
    all_to_all              sharded to sharded      all-to-all               all_to_all
    replicate_to_partial    replicated to varying   keeps it on one rank     first_of
    first_of                varying to replicated   nothing: all are equal   replicate_to_partial
    exchange                sharded to sharded      boxes to any rank        exchange, back

Each row's gradient is its transpose, and the transposes are rows of the table, too. If a `cast` is forgotten, the loss
is right and the gradients are wrong.

`replicate_to_partial` and `first_of` need no communication because the gradient of a partial sum is the gradient of the
sum, which is equal on every rank.

On an axis of one rank each returns its input; where no gradient is needed none makes an autograd node. `pending` is a
collective that was started before and only has to be waited for. Each node has its `origin`; see `observe`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from terrazzo._torch.autograd import forward_mode_active, functorch_active
from terrazzo._torch.tensors import is_view
from terrazzo.comm import collectives, observe
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import assemble
from terrazzo.comm.pending import Pending
from terrazzo.errors import CommError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_sizes

_Pending = Pending[Tensor] | None


def _differentiates(x: Tensor) -> bool:
    # Both hide the computation from requires_grad, so their inner tensors would be treated as constants.
    if forward_mode_active() and forward_ad.unpack_dual(x).tangent is not None:
        raise CommError("communication has no forward-mode derivative: use backward, or autograd.grad twice for a jvp")
    if functorch_active():
        raise CommError("torch.func's transforms cannot pass through communication: use autograd.grad instead")
    return x.requires_grad and torch.is_grad_enabled()


def _writable(result: Tensor) -> Tensor:
    # Autograd forbids in-place writes to an output that is a view; that it is one here is an implementation detail.
    return result.detach() if is_view(result) else result


def _apply_of(function: type[Function]) -> Callable[..., Any]:
    # Function.apply looks for a setup_context and for functorch's transforms at each call, which takes a microsecond.
    # Not needed here: these functions have no setup_context, and _differentiates refuses the transforms.
    return super(Function, function).apply  # type: ignore[misc]  # the stub of _C._FunctionBase has no apply


# ------------------------------------------------------------------ replicated to varying and back


class _Cast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.axis = axis
        return x.view_as(x)  # a view, so that autograd refuses to write through it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_replicate(grad, ctx.axis), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, op: str, pending: _Pending) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.axis = axis
        ctx.op = op
        return _writable(collectives.all_reduce(x, axis, op) if pending is None else pending.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = cast(grad, ctx.axis)
        return (grad / ctx.axis.size if ctx.op == "avg" else grad), None, None, None


def cast(x: Tensor, axis: Axis) -> Tensor:
    """A replicated value for ranks that use it differently: the same values; its gradient is summed over the ranks."""
    if axis.size == 1 or not _differentiates(x):
        return x
    return _apply_cast(x, axis)


def reduce_replicate(x: Tensor, axis: Axis, op: str = "sum", pending: _Pending = None) -> Tensor:
    """The reduction of a varying value, replicated; `op` is sum, avg, product, max or min.

    Ranks that tie for max or min share the gradient evenly, as elements do in `torch.amax`.
    For max, min and product a `pending` result is used only if no gradient is wanted.
    """
    if axis.size == 1:
        return x
    if not _differentiates(x):
        return collectives.all_reduce(x, axis, op) if pending is None else pending.wait()
    if op in ("sum", "avg"):
        return _apply_all_reduce(x, axis, op, pending)
    if pending is not None:
        pending.wait()
    sizes = chunk_sizes(x.numel(), axis.size)
    own = _reduce_received(x.reshape(-1), axis, 0, sizes, op)
    return gather_replicate(own, axis, 0, sizes).view(x.shape)


# ------------------------------------------------------------------ sharded to replicated and back


class _GatherReplicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.args = (axis, dim, sizes)
        return _writable(collectives.all_gather(x, axis, dim, sizes) if pending is None else pending.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return slice_own(grad, *ctx.args), None, None, None, None


class _SliceOwn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.args = (axis, dim, sizes)
        return _own_part(x, axis, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_replicate(grad, *ctx.args), None, None, None


def gather_replicate(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending = None) -> Tensor:
    """A sharded value gathered, for ranks that compute the same with it; `sizes` are the lengths along `dim`."""
    if axis.size == 1:
        return x
    if not _differentiates(x):
        return collectives.all_gather(x, axis, dim, sizes) if pending is None else pending.wait()
    return _apply_gather_replicate(x, axis, dim, sizes, pending)


def slice_own(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of a replicated value, copied: a view would keep the whole tensor alive."""
    if axis.size == 1:
        return x
    return _apply_slice_own(x, axis, dim, sizes) if _differentiates(x) else _own_part(x, axis, dim, sizes)


def _own_part(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    if len(sizes) != axis.size or not 0 <= dim < x.ndim or x.shape[dim] != sum(sizes):
        raise CommError(
            f"a tensor of shape {tuple(x.shape)} cannot be sliced on {axis} into {tuple(sizes)} along dim {dim}"
        )
    own = x.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])
    return own.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ sharded to varying and back


class _GatherVarying(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.args = (axis, dim, sizes)
        return _writable(collectives.all_gather(x, axis, dim, sizes) if pending is None else pending.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(grad, *ctx.args), None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str, pending: _Pending) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.args = (axis, dim, sizes)
        ctx.op = op
        return _writable(collectives.reduce_scatter(x, axis, dim, sizes, op) if pending is None else pending.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis = ctx.args[0]
        return gather_varying(grad / axis.size if ctx.op == "avg" else grad, *ctx.args), None, None, None, None, None


def gather_varying(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending = None) -> Tensor:
    """A sharded value gathered, for ranks that use it differently; `sizes` are the lengths along `dim`."""
    if axis.size == 1:
        return x
    if not _differentiates(x):
        return collectives.all_gather(x, axis, dim, sizes) if pending is None else pending.wait()
    return _apply_gather_varying(x, axis, dim, sizes, pending)


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str = "sum", pending: _Pending = None
) -> Tensor:
    """This rank's part of the reduction of a varying value; `op` and `pending` are as in `reduce_replicate`."""
    if axis.size == 1:
        return x
    if not _differentiates(x):
        return collectives.reduce_scatter(x, axis, dim, sizes, op) if pending is None else pending.wait()
    if op in ("sum", "avg"):
        return _apply_reduce_scatter(x, axis, dim, sizes, op, pending)
    if pending is not None:
        pending.wait()
    return _reduce_received(x, axis, dim, sizes, op)


def _reduce_received(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str) -> Tensor:
    """A reduce-scatter that sends the terms and reduces them with torch, whose gradients are known to any order."""
    n = axis.size
    received = all_to_all(x.unsqueeze(0), axis, dim + 1, sizes, 0, (1,) * n)
    if op == "product":
        return received.prod(0)
    if op in ("max", "min"):
        return received.amax(0) if op == "max" else received.amin(0)
    raise CommError(f"{op!r} is not a reduction; use one of sum, avg, product, max, min")


# ------------------------------------------------------------------ sharded to sharded


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        pending: _Pending,
    ) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.back = (axis, concat_dim, concat_sizes, split_dim, split_sizes)
        args = (split_dim, split_sizes, concat_dim, concat_sizes)
        return _writable(collectives.all_to_all(x, axis, *args) if pending is None else pending.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(grad, *ctx.back), None, None, None, None, None, None


def all_to_all(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    pending: _Pending = None,
) -> Tensor:
    """A value sharded along `concat_dim` becomes one sharded along `split_dim`; see `collectives.all_to_all`."""
    if axis.size == 1:
        return x
    args = (split_dim, split_sizes, concat_dim, concat_sizes)
    if not _differentiates(x):
        return collectives.all_to_all(x, axis, *args) if pending is None else pending.wait()
    return _apply_all_to_all(x, axis, *args, pending)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        send: Sequence[Box | None],
        receive: Sequence[Box | None],
        shape: Sequence[int],
        pending: Pending[list[Tensor]] | None,
    ) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.back = (axis, receive, send, x.shape)
        return _writable(_exchange_boxes(x, axis, send, receive, shape, pending))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grad, *ctx.back), None, None, None, None, None


def exchange(
    x: Tensor,
    axis: Axis,
    send: Sequence[Box | None],
    receive: Sequence[Box | None],
    shape: Sequence[int],
    pending: Pending[list[Tensor]] | None = None,
) -> Tensor:
    """Box `send[i]` of `x` goes to rank i; box `receive[i]` of the result, of `shape`, comes from rank i.

    None: nothing is sent or received. Elements of the result that no rank sends are 0; those that several ranks send
    are summed.
    `pending` may be a `collectives.exchange_start` of the same boxes.
    """
    if axis.size == 1 and send[0] == receive[0] == Box.whole(x.shape) and tuple(shape) == tuple(x.shape):
        return x
    if not _differentiates(x):
        return _exchange_boxes(x, axis, send, receive, shape, pending)
    return _apply_exchange(x, axis, send, receive, shape, pending)


def _exchange_boxes(
    x: Tensor,
    axis: Axis,
    send: Sequence[Box | None],
    receive: Sequence[Box | None],
    shape: Sequence[int],
    pending: Pending[list[Tensor]] | None,
) -> Tensor:
    if pending is None:
        pieces = [None if box is None else x[box.slices()] for box in send]
        lengths = [None if box is None else box.lengths for box in receive]
        pending = collectives.exchange_start(pieces, axis, lengths, x)
    return assemble(pending.wait(), receive, shape, x)


# ------------------------------------------------------------------ replicated to partial and back


class _KeepFirst(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.axis = axis
        return _first_only(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return first_of(grad, ctx.axis), None


class _FirstOf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return replicate_to_partial(grad, ctx.axis), None


def replicate_to_partial(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """A replicated value as partial terms whose reduction by `op` it is.

    For sum, the value on the first rank and 0 on the others; for product likewise with 1; for avg, max and min the
    value itself on every rank.
    """
    if axis.size == 1:
        return x
    if op == "sum":
        return _apply_keep_first(x, axis) if _differentiates(x) else _first_only(x, axis)
    if op in ("avg", "max", "min"):
        return cast(x, axis)
    if op != "product":
        raise CommError(f"{op!r} is not a reduction; use one of sum, avg, product, max, min")
    varying = cast(x, axis)
    # masked_fill instead of a new tensor: it stays in the graph, so that every rank takes part in the cast's backward.
    return varying.masked_fill(torch.full((), axis.index > 0, device=x.device), 1)


def first_of(x: Tensor, axis: Axis) -> Tensor:
    """A varying value that is in fact equal on all ranks, as a replicated one."""
    if axis.size == 1 or not _differentiates(x):
        return x
    return _apply_first_of(x, axis)


def _first_only(x: Tensor, axis: Axis) -> Tensor:
    if axis.index == 0:
        return x.detach().clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


_apply_cast = _apply_of(_Cast)
_apply_all_reduce = _apply_of(_AllReduce)
_apply_gather_replicate = _apply_of(_GatherReplicate)
_apply_slice_own = _apply_of(_SliceOwn)
_apply_gather_varying = _apply_of(_GatherVarying)
_apply_reduce_scatter = _apply_of(_ReduceScatter)
_apply_all_to_all = _apply_of(_AllToAll)
_apply_exchange = _apply_of(_Exchange)
_apply_keep_first = _apply_of(_KeepFirst)
_apply_first_of = _apply_of(_FirstOf)
