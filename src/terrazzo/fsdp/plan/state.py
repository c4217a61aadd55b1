"""The planner's state, and the events that change it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple


class Where(IntEnum):
    """The state of a unit's parameters."""

    SHARDED = 0
    GATHERING = 1
    UNSHARDED = 2
    INNER = 3  # sharded over the smaller mesh
    GATHERING_INNER = 4  # being gathered over the smaller mesh
    RESTING = 5  # the sharded parameters are registered, although the unsharded ones have memory
    AWAITED = 6  # as RESTING, after forward, until backward begins with it

    @property
    def is_whole(self) -> bool:
        """Whether the unsharded parameters have values."""
        return self in (Where.UNSHARDED, Where.RESTING, Where.AWAITED)


class Phase(IntEnum):
    """The part of the step in which a unit's modules are."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


class Reducing(NamedTuple):
    """A running reduction, and its progress."""

    unit: int
    stored: bool = False  # its result is kept for a later reduction over the replicas
    to_replicas: bool = False  # the all-reduce was started
    released: bool = False  # the packed buffer was freed


class Event(Enum):
    """The kinds of events. An event is a tuple of one of these and the values in the comment."""

    FORWARD = "the outermost forward begins"  # module, whether in backward, units whose shards were written
    ENTER = "the forward of a module begins"  # module, whether in backward
    LEAVE = "the forward of a module ends"  # module, whether it will have a backward, whether that has no hook
    FORWARD_ENDS = "the outermost forward has ended"  # whether in backward
    REACH = "backward reaches a unit's outputs"  # unit, units whose forwards had ended before, the latest first
    REACH_END = "backward leaves a unit's inputs"  # unit
    RECORD = "this backward records a graph, through which another one may run"
    BACKWARD_ENDS = "backward has ended"  # units with gradients
    LAST = "it is known whether backwards are the last before an optimizer's step"  # whether they are
    REST = "optimizers and users are to see sharded parameters"  # of these units
    STEP = "an optimizer steps"
    FOLLOW = "shards were written after the step had begun"
    RECOMPUTE = "the forward of a unit is computed again in its backward"  # unit
    UNSHARD = "the user asks for a gather"  # unit, whether outside of any forward and backward
    WAIT = "the user waits for it"  # unit
    RESHARD = "sharded parameters are asked for"  # unit
    REDUCE = "the user asks for the reduction of what was accumulated"

    __hash__ = object.__hash__  # by identity and in C: an event is looked up for every module that runs


@dataclass(frozen=True, slots=True)
class State:
    """The state of a root's units. It does not depend on values, so the same few states occur again and again."""

    where: tuple[Where, ...]
    phase: tuple[Phase, ...]
    running: tuple[int, ...]  # for each unit the modules that this forward has yet to run, as bits
    outermost: int = -1  # the module whose forward the user called
    entered: int = 0  # the number of units that this forward has entered
    # Units whose forwards have ended, the latest first: their backwards come in this order. Those that backward has
    # reached are none of them any more, nor are those of a module's last forward when the next one begins.
    ended: tuple[int, ...] = ()
    in_backward: bool = False
    records_graph: bool = False  # whether another backward may run through this one
    reducing: tuple[Reducing, ...] = ()  # the oldest first
    needed: frozenset[int] = frozenset()  # units in forward that must stay unsharded afterwards
    is_last: bool = True  # whether backwards are the last before an optimizer's step
    awaits_step: bool = False  # whether gradients wait for that

    @staticmethod
    def first(units: int) -> State:
        """The state in which everything is sharded."""
        return State((Where.SHARDED,) * units, (Phase.IDLE,) * units, (0,) * units)

    def anew(self) -> State:
        """The state after a failure: all is sharded again; what is set between steps stays as it is."""
        return replace(State.first(len(self.where)), is_last=self.is_last, awaits_step=self.awaits_step)
