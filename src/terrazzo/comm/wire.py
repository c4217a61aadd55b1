"""The primitives that everything is sent with, on contiguous buffers, in the fastest way that each backend has.

Process groups are called directly: the functions of `torch.distributed` around these calls take 20 to 70 microseconds,
as long as a small collective as a whole.

Gloo sends most dtypes and reduces some of them; a dtype that it cannot send is sent as bytes. Three of its reductions
are not good enough: its reduce-scatter is an all-reduce internally (it sends twice as much as needed), its max and min
may lose a NaN depending on the order of the ranks, and its sums of half types round after each rank. Its all-to-all
has none of these problems and the lowest latency, so most reductions are built on it.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from terrazzo._torch.groups import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    all_gather_flat,
    backend_of,
    premultiplied_sum,
    reduce_scatter_flat,
)
from terrazzo.comm import captured, observe
from terrazzo.comm.axis import Axis
from terrazzo.comm.wrapped import each_inner, is_wrapper
from terrazzo.errors import CommError


class ScaledSum(NamedTuple):
    """A sum whose terms are multiplied by a factor first; backends that average multiply while they reduce."""

    factor: float


_OPS = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "avg": ReduceOp.AVG,  # for backends that average while they reduce
}
_REDUCE_OPS = {name: ReduceOp(op) for name, op in _OPS.items()}

HALF = frozenset([torch.float16, torch.bfloat16])
_FLOATS = frozenset([torch.float32, torch.float64, torch.float16, torch.bfloat16])
_INTEGERS = frozenset([torch.int8, torch.uint8, torch.int32, torch.int64])
_MOVABLE = _FLOATS | _INTEGERS | {torch.bool}


P = ParamSpec("P")
T = TypeVar("T")


class Sending(threading.local):
    """Per thread: whether the running process group call comes from here and was reported to observers already; and
    whether collectives run on the accelerator's current stream."""

    now = False
    here = False


sending = Sending()


class OnThisStream(AbstractContextManager[None]):
    """A block in which collectives run on the accelerator's current stream, in order with all else there, and with its
    priority; elsewhere they run on a stream of the backend.

    So NCCL gives no work to wait for, and keeps no tensor: who uses the result, or frees what was sent, on another
    stream has that stream wait for this one, as for other operations.
    """

    def __enter__(self) -> None:
        self._before, sending.here = sending.here, True

    def __exit__(self, *_: object) -> None:
        sending.here = self._before


def _tells(primitive: Callable[P, T]) -> Callable[P, T]:
    """Set `sending` while this primitive runs, if there are observers."""

    @wraps(primitive)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not observe.observers or sending.now:
            return primitive(*args, **kwargs)
        sending.now = True
        try:
            return primitive(*args, **kwargs)
        finally:
            sending.now = False

    return run


def _options(kind: type[T], here: bool, op: ReduceOp | None = None) -> T:
    """Options of a collective, which runs on the current stream if `here`."""
    options: Any = kind()
    options.asyncOp = not here
    if op is not None:
        options.reduceOp = op
    return options


_BOTH = (False, True)
_ALL_REDUCE = {(name, here): _options(AllreduceOptions, here, op) for name, op in _REDUCE_OPS.items() for here in _BOTH}
_REDUCE_SCATTER: dict[tuple[str | ScaledSum, bool], ReduceScatterOptions] = {
    (name, here): _options(ReduceScatterOptions, here, op) for name, op in _REDUCE_OPS.items() for here in _BOTH
}
_ALL_GATHER = {here: _options(AllgatherOptions, here) for here in _BOTH}
_ALL_TO_ALL = {here: _options(AllToAllOptions, here) for here in _BOTH}


def reduce_op(op: str | ScaledSum) -> Any:
    """What torch's functions call a reduction: `ReduceOp.SUM` and the like."""
    return _OPS[op] if isinstance(op, str) else premultiplied_sum(op.factor)


def reduces(x: Tensor, op: str) -> bool:
    """Whether the backend of this tensor reduces it as torch would on one device.

    Gloo rounds half types after each rank, where torch accumulates in float32. Other backends are used as they are:
    there the number of bytes matters more. Wrapper subclasses define what their sum is.
    """
    if (x.dtype in HALF and x.is_cpu) or is_wrapper(x):
        return False
    return x.dtype in _INTEGERS or (x.dtype in _FLOATS and op in ("sum", "avg", "product"))


def has_reduce_scatter(x: Tensor) -> bool:
    """Whether the backend of this tensor has a real reduce-scatter."""
    return not x.is_cpu


def averages(axis: Axis, x: Tensor) -> bool:
    """Whether the backend of this tensor averages, or multiplies, while it reduces, without a pass of its own: NCCL."""
    if x.is_cpu or x.dtype not in _FLOATS or axis.group is None or is_wrapper(x) or captured.capturing():
        return False
    return backend_of(axis.group, x.device).name() == "nccl"


@_tells
def all_reduce(axis: Axis, buffer: Tensor, op: str) -> Work | None:
    """Reduce `buffer` in place."""
    if captured.capturing():
        captured.all_reduce(axis, buffer, op)
        return None
    return _group(axis).allreduce([buffer], _ALL_REDUCE[op, sending.here])


@_tells
def reduce_scatter(axis: Axis, out: Tensor, buffer: Tensor, op: str | ScaledSum) -> Work | None:
    """Reduce the parts of `buffer`, all as long as `out`, each to the rank at its position."""
    if isinstance(op, str) and captured.capturing():
        captured.reduce_scatter(axis, out, buffer, op)
        return None
    here = sending.here
    options = _REDUCE_SCATTER.get((op, here)) or _options(ReduceScatterOptions, here, reduce_op(op))
    return reduce_scatter_flat(_group(axis), out.view(-1), buffer.view(-1), options)


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor. A single element may have any stride, which `view(dtype)` refuses."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@_tells
def all_gather(axis: Axis, out: Tensor, part: Tensor) -> Work | None:
    """Concatenate equally long parts in `out`."""
    if is_wrapper(part):
        return each_inner(lambda out, part: all_gather(axis, out, part), out, part)
    out, part = out.view(-1), part.view(-1)
    if part.dtype not in _MOVABLE:
        out, part = _bytes_of(out), _bytes_of(part)
    if captured.capturing():
        captured.all_gather(axis, out, part)
        return None
    return all_gather_flat(_group(axis), out, part, _ALL_GATHER[sending.here])


@_tells
def all_to_all(
    axis: Axis,
    out: Tensor,
    buffer: Tensor,
    out_sizes: Sequence[int] | None = None,
    buffer_sizes: Sequence[int] | None = None,
) -> Work | None:
    """Send each rank its part of the flat `buffer`; concatenate the received parts in the flat `out`.

    Without sizes, every rank sends every rank the same number of elements. Then all ranks must leave the sizes out:
    backends have another call for it, whose cost on the host does not grow with the number of ranks.
    """
    if is_wrapper(buffer):
        return each_inner(lambda out, buffer: all_to_all(axis, out, buffer, out_sizes, buffer_sizes), out, buffer)
    if out_sizes is None or buffer_sizes is None:
        return _all_to_all_even(axis, out, buffer)
    if buffer.dtype not in _MOVABLE:
        width = buffer.element_size()
        out, buffer = _bytes_of(out), _bytes_of(buffer)
        out_sizes = [size * width for size in out_sizes]
        buffer_sizes = [size * width for size in buffer_sizes]
    if captured.capturing():
        captured.all_to_all(axis, out, buffer, out_sizes, buffer_sizes)
        return None
    options = _ALL_TO_ALL[sending.here]
    return _group(axis).alltoall_base(out, buffer, list(out_sizes), list(buffer_sizes), options)


def _all_to_all_even(axis: Axis, out: Tensor, buffer: Tensor) -> Work | None:
    if buffer.dtype not in _MOVABLE:
        out, buffer = _bytes_of(out), _bytes_of(buffer)
    if captured.capturing():
        sizes = [buffer.numel() // axis.size] * axis.size
        captured.all_to_all(axis, out, buffer, sizes, sizes)
        return None
    return _group(axis).alltoall_base(out, buffer, [], [], _ALL_TO_ALL[sending.here])


@_tells
def broadcast(axis: Axis, buffer: Tensor, src: int) -> Work | None:
    """Overwrite `buffer` with that of the rank at position `src`."""
    if buffer.dtype not in _MOVABLE:
        buffer = _bytes_of(buffer)
    if captured.capturing():
        captured.broadcast(axis, buffer, src)
        return None
    options = BroadcastOptions()
    options.rootRank = src
    return _group(axis).broadcast([buffer], options)


@_tells
def send(axis: Axis, buffer: Tensor, to: int, tag: int) -> Work:
    """Send `buffer` to position `to`."""
    return _group(axis).send([buffer], to, tag)


@_tells
def receive(axis: Axis, out: Tensor, source: int, tag: int) -> Work:
    """Overwrite `out` with what position `source` sends."""
    return _group(axis).recv([out], source, tag)


def _group(axis: Axis) -> ProcessGroup:
    if axis.group is None:
        raise CommError(f"{axis} has only one rank, so there is no process group to communicate with")
    return axis.group
