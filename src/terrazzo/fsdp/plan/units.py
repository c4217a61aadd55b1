"""The input of the planner: the sizes and settings of each unit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Sizes(NamedTuple):
    """The bytes of a unit's buffers on this rank, and the bytes that a rank sends in its collectives, on average."""

    shard: int = 0
    sent: int = 0  # the copy of the shard that a gather sends: in another dtype, or on the device
    gathered: int = 0  # the buffer of a gather, if it is not in place
    unsharded: int = 0  # 0 if the unsharded parameters are the shards
    kept: int = 0
    gradients: int = 0
    accumulated: int = 0  # gradients that wait for a reduction, if that is in another dtype
    packed: int = 0
    reduced: int = 0
    exchanged: int = 0  # what an all-reduce with a codec sends and receives
    result: int = 0  # reduced gradients after their division and conversion, if these need memory
    gather_moves: int = 0
    kept_moves: int = 0  # sent for a gather over the smaller mesh
    reduce_moves: int = 0
    all_reduce_moves: int = 0
    in_place: bool = False  # whether a gather receives most bytes directly into the unsharded parameters

    @staticmethod
    def of(parts: Iterable[Sizes], in_place: bool) -> Sizes:
        """The sizes of a unit that has these parts."""
        return Sizes._make(map(sum, zip(*parts, strict=True)))._replace(in_place=in_place)

    @property
    def arriving(self) -> int:
        """The memory that is allocated when a gather starts."""
        return self.gathered + self.unsharded * self.in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Settings on which no size depends. Programs turn some of them for every micro-batch."""

    reshard_after_forward: bool = True
    reshard_inner: bool = False  # whether to reshard to a smaller mesh
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    gradient_sync: bool = True
    all_reduce: bool = True  # over the replicas of HSDP


@dataclass(frozen=True, slots=True)
class UnitSpec(Switches):
    """Groups whose parameters are gathered and reduced in one message for each dtype."""

    name: str
    sizes: Sizes | None = None  # None: it has no parameters
    trainable: bool = True
    aliased: bool = False  # whether the unsharded parameters are the shards
    alone: bool = False  # whether no other rank reduces with this one
    replicated: bool = False  # whether gradients are also reduced over replicas
    stays_if_last: bool = False  # whether it keeps its memory after forward if backward begins with it
    keeps_part: bool = False  # whether only some are kept over the smaller mesh; others are gathered from the shards
    forward_prefetch: tuple[int, ...] | None = None  # units; None: those that follow in the last forward
    backward_prefetch: tuple[int, ...] | None = None
    reduce_buffers: int = 1  # buffers of packed gradients that may be in reduction when its own are packed
    double_buffers: bool = False  # whether the buffers of its gathers and reductions are not freed
    groups: tuple[int, ...] = ()  # the numbers of its groups; by default only its own


@dataclass(frozen=True, slots=True)
class Spec:
    """All units of one root. A unit has the number of its first group; those of its other groups stand for nothing."""

    units: tuple[UnitSpec, ...]
    streams: bool  # whether the device has streams; else the host waits for results
    modules: tuple[int, ...] = ()  # the unit of each module; by default each has one
    overlapped: int = 1 << 20  # bytes on CPU that may be gathered further ahead, or be in reduction meanwhile
    furthest: int = 4  # the number of units that may be gathered ahead

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", tuple(range(len(self.units))))
