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
    gather_replicate        sharded to replicated   all-gather               slice_own
    slice_own               replicated to sharded   keeps its own part       gather_replicate
    gather_varying          sharded to varying      all-gather               reduce_scatter
    reduce_scatter          varying to sharded      reduce-scatter           gather_varying
    all_to_all              sharded to sharded      all-to-all               all_to_all
    replicate_to_partial    replicated to varying   keeps it on one rank     first_of
    first_of                varying to replicated   nothing: all are equal   replicate_to_partial
    exchange                sharded to sharded      boxes to any rank        exchange, back
    exchange_rows           sharded to sharded      rows to any rank         exchange_rows, back

Each row's gradient is its transpose, and the transposes are rows of the table, too: `_Row` is a row, and one autograd
node runs them all. If a `cast` is forgotten, the loss is right and the gradients are wrong.

`replicate_to_partial` and `first_of` need no communication because the gradient of a partial sum is the gradient of the
sum, which is equal on every rank.

On an axis of one rank each returns its input; where no gradient is needed none makes an autograd node. `pending` is a
collective that was started before and only has to be waited for. Each node has its `origin`; see `observe`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from terrazzo._torch.autograd import forward_mode_active, functorch_active, is_transformed, outside_transforms
from terrazzo._torch.tensors import is_view
from terrazzo.comm import collectives, observe
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import assemble
from terrazzo.comm.pending import Pending
from terrazzo.comm.wrapped import copied, cut, is_wrapper
from terrazzo.errors import CommError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_sizes

_Pending = Pending[Tensor] | None


def _differentiates(x: Tensor) -> bool:
    # Both hide the computation from requires_grad, so their inner tensors would be treated as constants.
    if forward_mode_active() and forward_ad.unpack_dual(x).tangent is not None:
        raise CommError("communication has no forward-mode derivative: use backward, or autograd.grad twice for a jvp")
    if functorch_active() and is_transformed(x):
        raise CommError("torch.func's transforms cannot pass through communication: use autograd.grad instead")
    return x.requires_grad and torch.is_grad_enabled()


class _Row(NamedTuple):
    """A row of the table: both functions take a local tensor, the axis and the row's own arguments."""

    forward: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    is_view: bool = False
    """Whether the result is a view of the input, so that autograd refuses to write through it."""


class _Node(Function):
    """The autograd node of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: _Row, axis: Axis, args: tuple[Any, ...], wait: Any) -> Tensor:
        ctx.origin = observe.origin_of_node()
        ctx.gradient, ctx.axis, ctx.args = row.gradient, axis, args
        result: Tensor = row.forward(x, axis, *args) if wait is None else wait()
        # Elsewhere autograd would forbid in-place writes to an output that happens to be a view.
        return result if row.is_view or not is_view(result) else result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(grad, ctx.axis, *ctx.args), None, None, None, None


# Function.apply looks for a setup_context and for functorch's transforms at each call, which takes a microsecond. Not
# needed here: the node has no setup_context, and _differentiates refuses the transforms.
_apply = super(Function, _Node).apply


def _run(row: _Row, x: Tensor, axis: Axis, *args: Any, wait: Callable[[], Tensor] | None = None) -> Tensor:
    """The row's result, differentiable; `wait` waits for it if its communication was started before."""
    if functorch_active() and not is_transformed(x):  # for the transforms it is a constant
        with outside_transforms():
            return _run(row, x, axis, *args, wait=wait)
    if _differentiates(x):
        result: Tensor = _apply(x, row, axis, args, wait)
        return result
    return row.forward(x, axis, *args) if wait is None else wait()


def _waits(pending: _Pending) -> Callable[[], Tensor] | None:
    return None if pending is None else pending.wait


# ------------------------------------------------------------------ replicated to varying and back


def cast(x: Tensor, axis: Axis) -> Tensor:
    """A replicated value for ranks that use it differently: the same values; its gradient is summed over the ranks."""
    if axis.size == 1 or not _differentiates(x):
        return x
    return _run(_CAST, x, axis)


def reduce_replicate(x: Tensor, axis: Axis, op: str = "sum", pending: _Pending = None) -> Tensor:
    """The reduction of a varying value, replicated; `op` is sum, avg, product, max or min.

    Ranks that tie for max or min share the gradient evenly, as elements do in `torch.amax`.
    For max, min and product a `pending` result is used only if no gradient is wanted.
    """
    if axis.size == 1:
        return x
    if op in ("sum", "avg") or not _differentiates(x):
        return _run(_ALL_REDUCE, x, axis, op, wait=_waits(pending))
    if pending is not None:
        pending.wait()
    sizes = chunk_sizes(x.numel(), axis.size)
    own = _reduce_received(x.reshape(-1), axis, 0, sizes, op)
    return gather_replicate(own, axis, 0, sizes).view(x.shape)


def reduce_extreme(x: Tensor, axis: Axis, op: str, ties: Tensor) -> Tensor:
    """`reduce_replicate` by max or min of what is the extreme of this rank's elements already.

    `ties` is how many of them are equal to it. All elements that tie, on whatever rank, share the gradient evenly.
    """
    found = x.detach()
    top = collectives.all_reduce(found, axis, op)
    own = ties.to(torch.promote_types(x.dtype, torch.float32)) * (found == top)
    share = own / collectives.all_reduce(own, axis)
    return _run(_EXTREME, x, axis, share.to(x.dtype), wait=lambda: top)


# ------------------------------------------------------------------ sharded to replicated and back


def gather_replicate(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending = None) -> Tensor:
    """A sharded value gathered, for ranks that compute the same with it; `sizes` are the lengths along `dim`."""
    return x if axis.size == 1 else _run(_GATHER_REPLICATE, x, axis, dim, sizes, wait=_waits(pending))


def slice_own(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of a replicated value, copied: a view would keep the whole tensor alive."""
    return x if axis.size == 1 else _run(_SLICE_OWN, x, axis, dim, sizes)


def _own_part(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    if len(sizes) != axis.size or not 0 <= dim < x.ndim or x.shape[dim] != sum(sizes):
        raise CommError(
            f"a tensor of shape {tuple(x.shape)} cannot be sliced on {axis} into {tuple(sizes)} along dim {dim}"
        )
    if is_wrapper(x):
        return copied(cut(x, dim, sizes)[axis.index])
    own = x.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])
    return own.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ sharded to varying and back


def gather_varying(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], pending: _Pending = None) -> Tensor:
    """A sharded value gathered, for ranks that use it differently; `sizes` are the lengths along `dim`."""
    return x if axis.size == 1 else _run(_GATHER_VARYING, x, axis, dim, sizes, wait=_waits(pending))


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], op: str = "sum", pending: _Pending = None
) -> Tensor:
    """This rank's part of the reduction of a varying value; `op` and `pending` are as in `reduce_replicate`."""
    if axis.size == 1:
        return x
    if op in ("sum", "avg") or not _differentiates(x):
        return _run(_REDUCE_SCATTER, x, axis, dim, sizes, op, wait=_waits(pending))
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
    return _run(_ALL_TO_ALL, x, axis, split_dim, split_sizes, concat_dim, concat_sizes, wait=_waits(pending))


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
    wait = None if pending is None else partial(_arrived, pending, x, receive, shape)
    return _run(_EXCHANGE, x, axis, send, receive, shape, x.shape, wait=wait)


def _arrived(pending: Pending[list[Tensor]], x: Tensor, receive: Sequence[Box | None], shape: Sequence[int]) -> Tensor:
    return assemble(pending.wait(), receive, shape, x)


def _exchange_boxes(
    x: Tensor, axis: Axis, send: Sequence[Box | None], receive: Sequence[Box | None], shape: Sequence[int], _: Any
) -> Tensor:
    pieces = [None if box is None else x[box.slices()] for box in send]
    lengths = [None if box is None else box.lengths for box in receive]
    return assemble(collectives.exchange(pieces, axis, lengths, x), receive, shape, x)


def exchange_rows(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows of `x` go to the ranks, `send[i]` of them to rank i, and `receive[i]` come from it, in the ranks' order."""
    return x if axis.size == 1 else _run(_EXCHANGE_ROWS, x, axis, send, receive)


# ------------------------------------------------------------------ replicated to partial and back


def replicate_to_partial(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """A replicated value as partial terms whose reduction by `op` it is.

    For sum, the value on the first rank and 0 on the others; for product likewise with 1; for avg, max and min the
    value itself on every rank.
    """
    if axis.size == 1:
        return x
    if op == "sum":
        return _run(_KEEP_FIRST, x, axis)
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
    return _run(_FIRST_OF, x, axis)


def _first_only(x: Tensor, axis: Axis) -> Tensor:
    if axis.index == 0:
        return x.detach().clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ the table


def _share(grad: Tensor, axis: Axis, op: str) -> Tensor:
    return grad / axis.size if op == "avg" else grad


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


_CAST = _Row(_same, reduce_replicate, is_view=True)
_ALL_REDUCE = _Row(collectives.all_reduce, lambda grad, axis, op: _share(cast(grad, axis), axis, op))
_EXTREME = _Row(lambda x, axis, share: x, lambda grad, axis, share: cast(grad, axis) * share)
_GATHER_REPLICATE = _Row(collectives.all_gather, slice_own)
_SLICE_OWN = _Row(_own_part, gather_replicate)
_GATHER_VARYING = _Row(collectives.all_gather, reduce_scatter)
_REDUCE_SCATTER = _Row(
    collectives.reduce_scatter,
    lambda grad, axis, dim, sizes, op: gather_varying(_share(grad, axis, op), axis, dim, sizes),
)
_ALL_TO_ALL = _Row(
    collectives.all_to_all,
    lambda grad, axis, to, split, along, joined: all_to_all(grad, axis, along, joined, to, split),
)
_EXCHANGE = _Row(
    _exchange_boxes, lambda grad, axis, send, receive, shape, given: exchange(grad, axis, receive, send, given)
)
_EXCHANGE_ROWS = _Row(
    collectives.exchange_rows, lambda grad, axis, send, receive: exchange_rows(grad, axis, receive, send)
)
_KEEP_FIRST = _Row(_first_only, first_of)
_FIRST_OF = _Row(_same, replicate_to_partial, is_view=True)
