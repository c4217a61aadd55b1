"""The primitives of `wire` for a program that is being captured as a graph (`make_fx`): as functional operations.

A graph of them can be run, compiled and moved; a call of a process group would be left out of it, and what it receives
would be whatever memory held at the time.
"""

from collections.abc import Sequence

from torch import Tensor

from terrazzo._torch.dispatching import capturing, collective_operators
from terrazzo.comm.axis import Axis

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "capturing", "reduce_scatter"]


def all_reduce(axis: Axis, buffer: Tensor, op: str) -> None:
    buffer.copy_(_waited("all_reduce", buffer, op, _name(axis)))


def reduce_scatter(axis: Axis, out: Tensor, buffer: Tensor, op: str) -> None:
    out.view(-1).copy_(_waited("reduce_scatter_tensor", buffer.view(-1), op, axis.size, _name(axis)))


def all_gather(axis: Axis, out: Tensor, part: Tensor) -> None:
    out.copy_(_waited("all_gather_into_tensor", part, axis.size, _name(axis)))


def all_to_all(axis: Axis, out: Tensor, buffer: Tensor, out_sizes: Sequence[int], buffer_sizes: Sequence[int]) -> None:
    out.copy_(_waited("all_to_all_single", buffer, list(out_sizes), list(buffer_sizes), _name(axis)))


def broadcast(axis: Axis, buffer: Tensor, src: int) -> None:
    buffer.copy_(_waited("broadcast", buffer, src, _name(axis)))


def _waited(operation: str, *args: object) -> Tensor:
    operations = collective_operators()
    result: Tensor = operations.wait_tensor(getattr(operations, operation)(*args))
    return result


def _name(axis: Axis) -> str:
    assert axis.group is not None
    return axis.group.group_name
