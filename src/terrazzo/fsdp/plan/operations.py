"""What a plan consists of: operations, the buffers that they touch, the streams on which they run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Stream(Enum):
    """Where an operation runs. On CPU collectives run beside the caller, and whoever needs their result waits."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all-reduce"


class Kind(Enum):
    """What an operation does to a unit."""

    WRITE = "write"  # somebody, such as an optimizer, writes the shards; nobody plans that, but checks know it
    QUEUED = "queued"  # all that was queued up to now
    FOLLOW = "follow"  # the gather stream waits for it
    GATHER = "gather"  # begin to collect the shards of all ranks
    COPY_OUT = "copy out"  # fill the unsharded parameters, and register them
    USE = "use"  # forward or backward computes with the unsharded parameters
    FREE = "free"  # give their memory back, and register the sharded ones
    KEEP = "keep"  # the same, but keep this rank's part over the smaller mesh
    DISCARD = "discard"  # of a gather that nobody needs any more
    ACCUMULATE = "accumulate"  # keep unsharded gradients for a later reduction
    PACK = "pack"  # unsharded gradients into the buffer that is reduced
    REDUCE = "reduce"  # begin the reduce-scatter
    ALL_REDUCE = "all-reduce"  # begin to reduce over the replicas
    STORE = "store"  # keep what was reduced over the shards alone, for a later all-reduce
    RELEASE = "release"  # the packed buffer is no longer needed
    FINISH = "finish"  # divide, call the user's hook, convert, copy to where shards rest
    HAND_OVER = "hand over"  # to the sharded parameters
    SETTLE = "settle"  # the host waits for gradients that are copied to the CPU


class Buffer(NamedTuple):
    """Memory of one unit. `kind` is one of

    shard             this rank's part of the parameters
    gathered          what a gather brings
    unsharded         the parameters as forward sees them
    kept              this rank's part over the smaller mesh
    gradients         as backward computes them
    packed, reduced   what is reduced, and what comes of it
    partial           reduced over the shards, not yet over the replicas
    shard gradients   of the sharded parameters
    """

    kind: str
    unit: int


class Mark(NamedTuple):
    """A point on a stream that others wait for; it is recorded anew each time."""

    what: str
    unit: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that is done for one unit."""

    kind: Kind
    unit: int
    stream: Stream = Stream.COMPUTE
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    takes: tuple[Buffer, ...] = ()  # memory is allocated, on this operation's stream
    gives: tuple[Buffer, ...] = ()  # memory is given back, to the stream on which it was allocated
    waits: tuple[Mark, ...] = ()
    records: Mark | None = None
    moves: int = 0  # bytes that a rank sends, on average
    why: str = ""
    epoch: int = 0  # of the shard that it needs, counted from the beginning of the plan
    along: tuple[int, ...] = ()  # further units for which it is done in one
    epochs: tuple[int, ...] = ()  # of the shards of all its units, in their order, where they differ

    @property
    def units(self) -> tuple[int, ...]:
        """All units that it is about, in their order."""
        return tuple(sorted((self.unit, *self.along))) if self.along else (self.unit,)

    def epoch_of(self, unit: int) -> int:
        """The epoch that it needs of the unit's shard."""
        return self.epochs[self.units.index(unit)] if self.epochs else self.epoch

    def __str__(self) -> str:
        parts = [f"{self.kind.value} {', '.join(map(str, self.units))}", f"on {self.stream.value}"]
        for title, buffers in (("reads", self.reads), ("writes", self.writes), ("takes", self.takes)):
            if buffers:
                parts.append(f"{title} {', '.join(buffer.kind for buffer in buffers)}")
        if self.waits:
            parts.append("after " + ", ".join(f"{mark.what} {mark.unit}" for mark in self.waits))
        return "; ".join(parts)


COLLECTIVES = frozenset([Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE])


def collectives(operations: Iterable[Operation]) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives among them, in order: what has to be the same on all ranks."""
    return [(each.kind.value, each.units) for each in operations if each.kind in COLLECTIVES]
