"""Check that operations have no races and stay within their memory, for a plan or for a recorded step.

Operations of one stream run in order. Operations of two streams are ordered only if one waits for a mark that the other
stream has recorded. The checker keeps a vector clock for each stream, and finds

* reads of a buffer that another stream may still write, and writes to a buffer that another stream may still use;
* memory that is reused while another stream may still use it: an allocator returns memory to the stream that allocated
  it, which may write to it at once;
* the use of parameters of an older epoch than the shards';
* more memory than the bound, and buffers that are used without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from terrazzo.errors import FSDPError
from terrazzo.fsdp.plan.memory import sizes_of
from terrazzo.fsdp.plan.operations import COLLECTIVES, Buffer, Kind, Operation, Stream
from terrazzo.fsdp.plan.planner import advance
from terrazzo.fsdp.plan.state import Event, State, Where
from terrazzo.fsdp.plan.step import Plan, expected, order_of, writes
from terrazzo.fsdp.plan.units import Spec

_PERSISTENT = frozenset(["shard", "shard gradients"])

Clock = dict[str, int]


class PlanError(FSDPError):
    """A plan would use data that is not there yet, or not there any more."""


class _Memory(NamedTuple):
    """The last uses of a buffer, by stream and time."""

    home: str  # the stream that allocated it
    written: tuple[str, int] | None
    by: str  # the last writer, for messages
    read: Clock
    readers: dict[str, str]


class Checker:
    """Checks accesses and marks one by one. Streams and marks may have any names."""

    def __init__(self, sizes: Mapping[Buffer, int] | None = None, bound: int | None = None) -> None:
        self._now: dict[str, int] = {}
        self._known: dict[str, Clock] = {}
        self._marks: dict[object, Clock] = {}
        self._live: dict[Buffer, _Memory] = {}
        self._given: dict[str, list[tuple[Buffer, _Memory]]] = {}
        self._sizes, self._bound = sizes or {}, bound
        self.held = 0
        self.peak = 0

    def wait(self, stream: str, mark: object) -> None:
        """`stream` waits for a mark; without effect if the mark was never recorded."""
        for other, time in self._marks.get(mark, {}).items():
            known = self._clock(stream)
            known[other] = max(known.get(other, 0), time)

    def record(self, stream: str, mark: object) -> None:
        """Record a mark after everything that was queued on `stream` so far."""
        self._marks[mark] = {**self._clock(stream), stream: self._now.get(stream, 0)}

    def access(self, stream: str, operation: Operation) -> None:
        """Check an operation that runs on `stream`."""
        self._now[stream] = self._now.get(stream, 0) + 1
        for buffer in operation.takes:
            self._take(stream, buffer, operation)
        for buffer in operation.reads:
            memory = self._memory(buffer, operation)
            if memory is not None:
                self._check_after(stream, memory.written, buffer, operation, f"is read while {memory.by} may write it")
                memory.read[stream] = self._now[stream]
                memory.readers[stream] = str(operation)
        for buffer in operation.writes:
            memory = self._memory(buffer, operation)
            if memory is not None:
                self._check_unused(stream, memory, buffer, operation, "is written")
                self._live[buffer] = _Memory(memory.home, (stream, self._now[stream]), str(operation), {}, {})
        for buffer in operation.gives:
            memory = self._live.pop(buffer, None)
            if memory is not None:
                self.held -= self._sizes.get(buffer, 0)
                self._given.setdefault(memory.home, []).append((buffer, memory))

    def _take(self, stream: str, buffer: Buffer, operation: Operation) -> None:
        if buffer in self._live:
            return
        for given, memory in self._given.pop(stream, []):
            self._check_unused(stream, memory, given, operation, "was given back, and its memory is taken")
        self._live[buffer] = _Memory(stream, None, "", {}, {})
        self.held += self._sizes.get(buffer, 0)
        self.peak = max(self.peak, self.held)
        if self._bound is not None and self.held > self._bound:
            raise PlanError(f"{operation}: {self.held} bytes are in use, but at most {self._bound} are allowed")

    def _memory(self, buffer: Buffer, operation: Operation) -> _Memory | None:
        memory = self._live.get(buffer)
        if memory is None and buffer.kind in _PERSISTENT:
            memory = self._live[buffer] = _Memory("", None, "", {}, {})
        if memory is None and buffer.kind != "partial":
            raise PlanError(f"{operation}: {buffer.kind} of {buffer.unit} has no memory")
        return memory

    def _check_unused(self, stream: str, memory: _Memory, buffer: Buffer, operation: Operation, what: str) -> None:
        self._check_after(stream, memory.written, buffer, operation, f"{what} while {memory.by} may write it")
        for reader, time in memory.read.items():
            self._check_after(
                stream, (reader, time), buffer, operation, f"{what} while {memory.readers[reader]} may read it"
            )

    def _check_after(
        self, stream: str, other: tuple[str, int] | None, buffer: Buffer, operation: Operation, what: str
    ) -> None:
        if other is None or other[0] == stream or self._clock(stream).get(other[0], 0) >= other[1]:
            return
        raise PlanError(f"{operation}: on stream {stream} {buffer.kind} of {buffer.unit} {what} on stream {other[0]}")

    def _clock(self, stream: str) -> Clock:
        return self._known.setdefault(stream, {})


def check(operations: Iterable[Operation], spec: Spec, bound: int | None = None) -> int:
    """Raise `PlanError` for the first fault; returns the peak of bytes in use.

    `bound` is the most bytes that may be in use beside shards and their gradients.
    """
    checker = Checker(sizes_of(spec), bound)
    epochs: dict[int, int] = {}
    gathered: dict[int, int] = {}
    for each in operations:
        stream = each.stream
        if not spec.streams and each.stream is not Stream.COMPUTE:
            checker.record(Stream.COMPUTE, "host")  # the host computes, and starts all other operations
            checker.wait(stream, "host")
        for mark in each.waits:
            checker.wait(stream, mark)
        checker.access(stream, each)
        if each.records is not None:
            checker.record(stream, each.records)
        check_epoch(each, epochs, gathered)
    return checker.peak


def check_epoch(operation: Operation, epochs: dict[int, int], gathered: dict[int, int]) -> None:
    """Raise if an operation uses parameters that were gathered before the last write to their shards."""
    kind, unit, epoch = operation.kind, operation.unit, operation.epoch
    if kind is Kind.WRITE:
        epochs[unit] = epoch
    elif kind is Kind.GATHER and operation.reads[0].kind == "shard":
        shards = epochs.setdefault(unit, epoch)
        if epoch != shards:
            raise PlanError(f"{operation}: gathers epoch {epoch}, but the shards are at epoch {shards}")
        gathered[unit] = epoch
    elif kind is Kind.USE and any(buffer.kind == "unsharded" for buffer in operation.reads):
        used, shards = gathered.get(unit, -1), epochs.get(unit, -1)
        if used != shards:
            raise PlanError(f"{operation}: uses parameters of epoch {used}, but the shards are at epoch {shards}")


# ------------------------------------------------------------------ what is checked


def collectives(operations: Iterable[Operation]) -> list[tuple[str, int]]:
    """The collectives of operations, in order: these must be the same on all ranks."""
    return [(each.kind, each.unit) for each in operations if each.kind in COLLECTIVES]


def plan_steps(spec: Spec, steps: int, *, micro_batches: int = 1) -> Plan:
    """The operations of `steps` steps, each with `micro_batches` forwards, in which every module runs once, in order,
    inside the first; and with their backwards. The first forward knows no order."""
    first, *others = range(len(spec.modules))
    events = expected(spec, (first, tuple([(module, ()) for module in others])))
    order = order_of(spec, events)
    state, found = State.first(len(spec.units)), []
    for epoch in range(steps):
        for batch in range(micro_batches):
            for event in events:
                if event[0] is Event.FORWARD:
                    stale = [u for u, where in enumerate(state.where) if where is not Where.SHARDED]
                    event = (*event[:3], tuple(stale) if epoch and batch == 0 else ())
                elif event[0] is Event.BACKWARD_ENDS:
                    _, state = advance(spec, order, state, (Event.LAST, batch == micro_batches - 1))
                operations, state = advance(spec, order if epoch or batch else (), state, event)
                found += [replace(each, epoch=epoch) if each.kind is Kind.GATHER else each for each in operations]
        found += writes(spec, epoch + 1)
    return Plan(spec, tuple(found))
