"""The primitives of `wire` while a program is captured as a graph: functional collectives of PyTorch.

They become nodes of the graph, which can then be run, compiled and moved. A direct call of a process group would not
be in the graph, and its result would be uninitialised memory.

A program is captured either by `make_fx`, which is recognised by its mode, or by `terrazzo.compile`. The latter also
provides the keys that random operations draw, because they are inputs of its graphs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from terrazzo._torch.dispatching import being_traced, collective_operators, fake_mode
from terrazzo.comm.axis import Axis


class Recording(Protocol):
    """A capture by `terrazzo.compile`: it provides the random keys that the program draws."""

    fake: Any
    """The mode of its tensors without data."""

    def draw(self, mesh: Any, generator: torch.Generator | None) -> Tensor:
        """The number that the program draws next, as a 0-d int64 tensor on the CPU."""


recording: Recording | None = None
"""The capture that is running.

Not thread-local, because autograd runs a part of the program on its own threads. Use `recorder` to ask for it.
"""


def recorder() -> Recording | None:
    """The capture that this thread runs in, also on autograd's threads."""
    return recording if recording is not None and fake_mode() is recording.fake else None


def capturing() -> bool:
    """Whether operations are being recorded into a graph."""
    return being_traced() or recorder() is not None


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
