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
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import msgspec
from torch import nn

from terrazzo._torch.autograd import in_backward
from terrazzo.comm import CommEvent, add_observer, observe, remove_observer
from terrazzo.comm.axis import Axis
from terrazzo.fsdp.lookup import sharded
from terrazzo.fsdp.plan.operations import Kind, Operation
from terrazzo.fsdp.plan.units import Spec
from terrazzo.fsdp.timeline import Collective, Timeline, done, frame_of, groups_of


class TraceEvent(msgspec.Struct, frozen=True):
    """Something that was done for a group.

    `kind` is one of unshard (start a gather), prefetch (start a gather ahead of time), wait (wait for a gather, and
    copy out), reshard, reduce (start a reduction), all-reduce (over the replicas), gradients (set `.grad`).
    """

    kind: str
    group: str
    bytes: int  # that a rank sends, on average
    begin: float  # seconds since the trace began
    end: float
    in_backward: bool


_SHOWN = {
    Kind.COPY_OUT: "wait",
    Kind.FREE: "reshard",
    Kind.KEEP: "reshard",
    Kind.REDUCE: "reduce",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.HAND_OVER: "gradients",
}


@dataclass
class _Collective:
    """A collective that was started, and its end once that is known."""

    event: CommEvent
    thread: int
    begin: float
    end: float | None = None


class Trace:
    """The events of a step in the order in which they began on this rank's host, and the plan's operations."""

    def __init__(self, frame: Timeline, spec: Spec) -> None:
        self.events: list[TraceEvent] = []
        self.operations: list[Operation] = []
        self._times: list[tuple[float, float, bool]] = []  # of the operations
        self._frame = msgspec.structs.replace(frame, began=time(), planned=False)
        self._spec = spec
        self._zero = perf_counter()
        self._collectives: list[_Collective] = []

    def ran(self, operation: Operation, began: float) -> None:
        """Record an operation that has ended."""
        begin, end, backward = began - self._zero, perf_counter() - self._zero, in_backward()
        # Collectives that this thread started since `began` are those of the operation itself.
        thread = threading.get_ident()
        self._collectives = [each for each in self._collectives if each.thread != thread or each.begin < begin]
        self.operations.append(operation)
        self._times.append((begin, end, backward))
        kind = operation.why if operation.kind is Kind.GATHER else _SHOWN.get(operation.kind)
        if kind is not None:
            name = ", ".join([self._frame.groups[group] for group in groups_of(operation, self._spec)])
            self.events.append(TraceEvent(kind, name, operation.moves, begin, end, backward))

    def _started(self, event: CommEvent) -> None:
        """Record a collective that is about to start."""
        self._collectives.append(_Collective(event, threading.get_ident(), perf_counter() - self._zero))

    def _ended(self, kind: str, axis: Axis) -> None:
        """Record the end of the first collective of this kind and axis that has none yet."""
        for each in self._collectives:
            if each.end is None and each.event.kind == kind and each.event.axis is axis:
                each.end = perf_counter() - self._zero
                return

    def total_bytes(self) -> int:
        """Bytes that a rank sent for `fully_shard`, on average."""
        return sum(event.bytes for event in self.events)

    def __str__(self) -> str:
        width = max((len(event.group) for event in self.events), default=5)
        lines = [f"{'ms':>9}  {'took':>8}  {'':8}  {'what':9}  {'group':{width}}  {'bytes':>13}"]
        for e in self.events:
            phase = "backward" if e.in_backward else "forward"
            size = f"{e.bytes:,}" if e.bytes else ""
            took = (e.end - e.begin) * 1e3
            lines.append(f"{e.begin * 1e3:9.3f}  {took:8.3f}  {phase:8}  {e.kind:9}  {e.group:{width}}  {size:>13}")
        return "\n".join(lines)

    def timeline(self) -> Timeline:
        """All operations with their times and the memory in use, as `terrazzo view` shows them."""
        operations = done(self.operations, self._times, self._spec)
        return msgspec.structs.replace(self._frame, operations=operations, collectives=self._program_collectives())

    def _program_collectives(self) -> list[Collective]:
        return [
            Collective(
                each.event.kind,
                each.event.axis.name,
                each.event.bytes,
                each.begin,
                each.begin if each.end is None else each.end,
                each.event.in_backward,
                each.event.async_op,
            )
            for each in self._collectives
        ]

    def _bar(self, event: TraceEvent | Collective, name: str, row: str, backward: bool, nbytes: int) -> dict[str, Any]:
        return {
            "name": name,
            "cat": "backward" if backward else "forward",
            "ph": "X",
            "ts": event.begin * 1e6,
            "dur": (event.end - event.begin) * 1e6,
            "pid": self._frame.rank,
            "tid": row,
            "args": {"bytes": nbytes},
        }

    def chrome(self) -> bytes:
        """The trace in the format of trace viewers (one process per rank, one row per kind), with the timeline."""
        events = [
            self._bar(event, f"{event.kind} {event.group}", event.kind, event.in_backward, event.bytes)
            for event in self.events
        ]
        events += [
            self._bar(each, f"{each.kind} over {each.axis}", "collectives", each.backward, each.nbytes)
            for each in self._program_collectives()
        ]
        document = {"traceEvents": events, "displayTimeUnit": "ms", "terrazzo": self.timeline()}
        return msgspec.json.encode(document)

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
    found = Trace(frame_of(root), root.spec())
    before, root.executor.observers = root.executor.observers, (found,)
    add_observer(found._started)
    observe.add_end_observer(found._ended)
    try:
        yield found
    finally:
        observe.remove_end_observer(found._ended)
        remove_observer(found._started)
        root.executor.observers = before
