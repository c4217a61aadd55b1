"""What the planner knows: how units are, what has happened, and the state that follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from terrazzo.fsdp.plan.operations import Buffer


class Where(IntEnum):
    """How a unit's parameters are."""

    SHARDED = 0
    GATHERING = 1
    UNSHARDED = 2
    INNER = 3  # sharded over the smaller mesh
    GATHERING_INNER = 4  # from there


class Phase(IntEnum):
    """What a unit's modules are in."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


class Reducing(NamedTuple):
    """A reduction under way, and how far it has come."""

    unit: int
    along: tuple[int, ...] = ()  # those that are reduced together with it
    stored: bool = False  # the replicas' turn comes later: its result is kept until then
    to_replicas: bool = False  # the all-reduce was begun
    released: bool = False  # the packed buffer was given back

    @property
    def units(self) -> tuple[int, ...]:
        return (self.unit, *self.along)

    def buffers(self, kind: str) -> tuple[Buffer, ...]:
        return tuple([Buffer(kind, unit) for unit in self.units])


class Event(Enum):
    """What happens. An event is a tuple of one of these and what the comment says."""

    FORWARD = "the outermost forward begins"  # module, whether in backward, units whose shards were written
    ENTER = "the forward of a module begins"  # module, whether in backward
    LEAVE = "the forward of a module ends"  # module, whether its backward will come, whether it may come unannounced
    FORWARD_ENDS = "the outermost forward has ended"  # whether in backward
    REACH = "backward reaches a unit's outputs"  # unit, units whose forwards had ended before, the latest first
    REACH_END = "backward leaves a unit's inputs"  # unit
    BACKWARD_ENDS = "backward has ended"  # units with gradients, whether it was the last; whether a graph was recorded
    RECOMPUTE = "the forward of a unit is computed again in its backward"  # unit
    UNSHARD = "the user asks for a gather"  # unit, whether outside of any forward and backward
    WAIT = "the user waits for it"  # unit
    RESHARD = "sharded parameters are asked for"  # unit
    REDUCE = "the user asks for the reduction of what was accumulated"

    __hash__ = object.__hash__  # by identity and in C: an event is looked up for every module that runs


@dataclass(frozen=True, slots=True)
class State:
    """What the planner knows of a root's units. It never depends on values, so few states occur again and again."""

    where: tuple[Where, ...]
    phase: tuple[Phase, ...]
    running: tuple[int, ...]  # of each unit, modules that this forward has still to run, as bits
    outermost: int = -1  # the module whose forward the user called
    entered: int = 0  # how many units this forward has entered
    ended: tuple[int, ...] = ()  # units whose forwards ended last, the latest first: their backwards will come
    in_backward: bool = False
    reducing: tuple[Reducing, ...] = ()  # the oldest first
    joint: tuple[tuple[int, ...], ...] = ()  # units whose gathers were begun together, and are under way
    lent: frozenset[int] = frozenset()  # units that were gathered together with others, and nobody has used yet
    held: tuple[int, ...] = ()  # units whose gradients wait for those of units that are reduced together with them

    @staticmethod
    def first(units: int) -> State:
        """Everything is sharded."""
        return State((Where.SHARDED,) * units, (Phase.IDLE,) * units, (0,) * units)
