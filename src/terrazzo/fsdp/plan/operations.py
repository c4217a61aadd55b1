"""Operations of a plan, with the buffers that they use and the streams on which they run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Stream(StrEnum):
    """Where an operation runs. On CPU, collectives run on threads of the backend, and the host waits for results."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all-reduce"


class Kind(StrEnum):
    """The kind of an operation."""

    WRITE = "write"  # the optimizer or other code writes the shards; recorded for the checks, not planned
    QUEUED = "queued"  # record a mark after everything that is queued so far
    FOLLOW = "follow"  # the gather stream waits for that mark
    GATHER = "gather"  # start to gather the shards of all ranks
    COPY_OUT = "copy out"  # wait for the gather, fill the unsharded parameters, and register them
    USE = "use"  # forward or backward computes with the unsharded parameters
    REST = "rest"  # write to the shards what users wrote to the unsharded parameters, and register the sharded ones
    SHOW = "show"  # register the unsharded parameters again, which have memory
    FREE = "free"  # as REST, and free the others: the unsharded ones, or the part of them that was kept
    KEEP = "keep"  # as FREE, but keep this rank's part over the smaller mesh
    DISCARD = "discard"  # drop a gather that is not needed any more
    ACCUMULATE = "accumulate"  # keep unsharded gradients for a later reduction
    PACK = "pack"  # copy unsharded gradients into the buffer that is reduced
    REDUCE = "reduce"  # start the reduce-scatter
    ALL_REDUCE = "all-reduce"  # start to reduce over the replicas
    STORE = "store"  # keep gradients that are reduced over the shards only, for a later all-reduce
    RELEASE = "release"  # free the packed buffer
    FINISH = "finish"  # divide, call the user's hook, convert, copy to the shards' device
    HAND_OVER = "hand over"  # set `.grad` of the sharded parameters
    SETTLE = "settle"  # the host waits for gradients that are copied to the CPU


class Buffer(NamedTuple):
    """Memory of one unit. `kind` is one of

    shard             this rank's part of the parameters
    sent              the shard as a gather sends it, where that is a copy
    gathered          the result of a gather, before it is copied out
    unsharded         the parameters as forward sees them
    kept              this rank's part over the smaller mesh
    gradients         unsharded gradients, from backward
    accumulated       unsharded gradients that wait for a reduction, in its dtype, if that is another
    packed, reduced   the input and the result of a reduction
    exchanged         what an all-reduce with a codec sends and receives
    result            what becomes the gradients of the sharded parameters, or is added to them
    partial           gradients that are reduced over the shards, not yet over the replicas; in the memory of `reduced`
    shard gradients   gradients of the sharded parameters
    """

    kind: str
    unit: int


class Mark(NamedTuple):
    """A point on a stream for which other streams wait; it is recorded again each time."""

    what: str
    unit: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a step does, such as a gather; in the trace of a step that ran, with its times and memory.

    It is for a unit: parameters that are gathered together. In a plan the times are the numbers of the operations.
    """

    kind: Kind
    unit: int
    stream: Stream = Stream.COMPUTE
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    takes: tuple[Buffer, ...] = ()  # buffers that are allocated, on this operation's stream
    gives: tuple[Buffer, ...] = ()  # buffers that are freed, on the stream on which they were allocated
    waits: tuple[Mark, ...] = ()
    records: Mark | None = None
    moves: int = 0  # bytes that a rank sends, on average
    why: str = ""
    epoch: int = 0  # the epoch of the shard that it needs, counted from the beginning of the plan
    begin: float = 0.0  # when the host started it, in seconds
    end: float = 0.0  # when the host continued
    backward: bool = False  # whether backward was running
    memory: int = 0  # bytes of unsharded parameters, gradients and buffers that are in use during it
    after: int = 0  # the same after it

    @property
    def is_inner(self) -> bool:
        """Whether it gathers over the smaller mesh of `reshard_after_forward=N`."""
        return self.kind is Kind.GATHER and any(buffer.kind == "kept" for buffer in self.reads)

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.unit}", f"on {self.stream}"]
        for title, buffers in (("reads", self.reads), ("writes", self.writes), ("takes", self.takes)):
            if buffers:
                parts.append(f"{title} {', '.join(buffer.kind for buffer in buffers)}")
        if self.waits:
            parts.append("after " + ", ".join(f"{mark.what} {mark.unit}" for mark in self.waits))
        return "; ".join(parts)


WRITTEN = Mark("written", -1)

# The compute stream has copied out all gathers so far. Their memory belongs to the stream of gathers.
COPIED = Mark("copied", -1)

# The compute stream has read all results of reductions that were freed so far. Their memory belongs to the streams of
# reductions.
HANDED_OVER = Mark("handed over", -1)

# Gathers wait for everything that was queued before, such as the optimizer's writes to the shards.
FOLLOWING = (
    Operation(Kind.QUEUED, -1, records=WRITTEN),
    Operation(Kind.FOLLOW, -1, Stream.GATHER, waits=(WRITTEN,)),
)

# The same, also if the user has set an event for which the gathers of the next forward wait.
FOLLOWING_ALL = (Operation(Kind.USE, -1, records=WRITTEN), FOLLOWING[1])

COLLECTIVES = frozenset([Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE])
