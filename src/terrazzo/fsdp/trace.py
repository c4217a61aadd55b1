"""A trace of what `fully_shard` does in a step, readable as text and by trace viewers.

with terrazzo.fsdp.trace(model) as steps:
    train_step(model)
print(steps)
steps.save("step.json")     # open in chrome://tracing or Perfetto
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, time

import msgspec
from torch import nn

from terrazzo._torch.autograd import in_backward
from terrazzo.comm import CommEvent, add_observer, observe, remove_observer
from terrazzo.comm.axis import Axis
from terrazzo.fsdp.explain import sharded
from terrazzo.fsdp.perfetto import perfetto
from terrazzo.fsdp.plan.memory import Memory
from terrazzo.fsdp.plan.operations import Buffer, Kind, Operation
from terrazzo.fsdp.plan.step import lines_of
from terrazzo.fsdp.run.root import Root
from terrazzo.fsdp.run.unit import Unit
from terrazzo.fsdp.timeline import Collective, Timeline, frame_of
from terrazzo.layout.drawing import Shown

# Operations in which shards may be written: with what users wrote to unsharded parameters, or in hooks on gradients.
_WRITE = frozenset([Kind.REST, Kind.FREE, Kind.KEEP, Kind.HAND_OVER])


class Trace(Shown):
    """The operations of a step that ran, in the order in which they began on this rank's host, with their times."""

    def __init__(self, root: Root) -> None:
        self.operations: list[Operation] = []
        self._root, self._spec = root, root.spec()
        self._frame = msgspec.structs.replace(frame_of(root), began=time(), planned=False)
        self._memory = Memory(self._spec)
        self._epochs = {unit.index: unit.epoch for unit in root.units}  # of the shards, as far as is recorded
        self._zero = perf_counter()
        # The program's own collectives, by the number of the event: the thread that started each, and its axis.
        self._collectives: list[tuple[Collective, int, Axis]] = []

    def ran(self, operation: Operation, began: float) -> None:
        """Record an operation that has ended, and writes to shards since the last one."""
        unit = self._root.executor.units.get(operation.unit)
        writes = unit if operation.kind in _WRITE else None
        for each in self._root.units:
            if each is not writes:
                self._note_write(each)
        if operation.kind is Kind.GATHER and unit is not None:
            operation = replace(operation, epoch=unit.gathered_epoch)
        self._record(operation, began)
        if writes is not None:
            self._note_write(writes)

    def _note_write(self, unit: Unit) -> None:
        """Record that a unit's shards were written, by an optimizer or other code, if they were."""
        known, epoch = self._epochs.get(unit.index, unit.epoch), unit.epoch
        self._epochs[unit.index] = epoch
        if known != epoch:
            write = Operation(Kind.WRITE, unit.index, writes=(Buffer("shard", unit.index),), epoch=epoch)
            self._record(write, perf_counter())

    def _record(self, operation: Operation, began: float) -> None:
        begin, end = began - self._zero, perf_counter() - self._zero
        # Collectives that this thread started since `began` are those of the operation itself.
        thread = threading.get_ident()
        self._collectives[:] = [each for each in self._collectives if each[1] != thread or each[0].begin < begin]
        self.operations.append(self._memory.during(replace(operation, begin=begin, end=end, backward=in_backward())))

    def _started(self, event: CommEvent) -> None:
        """Record a collective that is about to start."""
        now, axis = perf_counter() - self._zero, event.axis
        found = Collective(event.kind, axis.name, event.bytes, now, now, event.in_backward, event.async_op)
        self._collectives.append((found, threading.get_ident(), axis))

    def _ended(self, kind: str, axis: Axis) -> None:
        """Record the end of the first collective of this kind and axis that has none yet."""
        for i, (each, thread, along) in enumerate(self._collectives):
            if each.end == each.begin and each.kind == kind and along is axis:
                ended = msgspec.structs.replace(each, end=perf_counter() - self._zero)
                self._collectives[i] = (ended, thread, axis)
                return

    def total_bytes(self) -> int:
        """Bytes that a rank sent for `fully_shard`, on average."""
        return sum(each.moves for each in self.operations)

    def __str__(self) -> str:
        lines = []
        for each, line in lines_of(self.operations, self._spec):
            times = f"{'ms':>9}  {'took':>8}  {'':8}"
            if each is not None:
                phase = "backward" if each.backward else "forward"
                times = f"{each.begin * 1e3:9.3f}  {(each.end - each.begin) * 1e3:8.3f}  {phase:8}"
            lines.append(f"{times}  {line}")
        return "\n".join(lines)

    def timeline(self) -> Timeline:
        """All operations with their times and the memory in use, as `terrazzo view` shows them."""
        collectives = [each for each, *_ in self._collectives]
        return msgspec.structs.replace(self._frame, operations=list(self.operations), collectives=collectives)

    def chrome(self) -> bytes:
        """The trace in the format of trace viewers, with the timeline."""
        shown = self.timeline()
        return perfetto([shown], terrazzo=shown)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `chrome()` to a file."""
        Path(path).write_bytes(self.chrome())


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what `fully_shard` does for `model`, and the program's own collectives, while the context lasts.

    Args:
        model: The root module, or any module of it that `fully_shard` was called on.
    """
    _, root = sharded(model, "trace")
    found = Trace(root)
    root.observers.append(found.ran)
    add_observer(found._started)
    observe.add_end_observer(found._ended)
    try:
        yield found
    finally:
        observe.remove_end_observer(found._ended)
        remove_observer(found._started)
        root.observers.remove(found.ran)
