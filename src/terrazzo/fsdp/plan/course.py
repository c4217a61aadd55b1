"""The course of a forward: in which order it came to the groups, and so in which order every rank's backward does.

Gathers and reductions are collectives, so ranks must start the same ones in the same order, although their losses may
reach different modules: rank 0's one head and rank 1's another, or some experts. Autograd runs backward in the order
opposite to that of forward, so hooks, where they run, run in the order of the course. A rank whose loss skips a group
does what belongs to it when the next hook runs, or at the end: it gathers the group for the others, and reduces zeros.

It does not know what is entered in other orders: several units that one checkpoint computes again, units in a forward
without a graph (a checkpoint with reentrance), and backward through a backward. There losses must reach the same units.
"""

from __future__ import annotations

from typing import Any

from terrazzo.fsdp.plan.state import Event


class Course:
    """The events of the backward of one forward, the last first. The outermost module's unit is left at the end of
    backward, so this has no event here."""

    __slots__ = ("__weakref__", "events", "left", "model", "order", "units")

    def __init__(self, model: Any, units: Any) -> None:
        self.model, self.units = model, units  # the root and its units then
        self.order: list[int] = []  # the units, as their forwards begin
        self.events: list[tuple[Any, ...]] = []
        self.left = -1  # the number of events that a backward has not come to; -1 before the first one

    def entered(self, unit: int) -> Spot:
        """The unit's forward begins; returns where in the course its event is."""
        events = self.events
        events.append((Event.REACH_END, unit))
        return self, len(events) - 1

    def left_by(self, unit: int, before: tuple[int, ...]) -> None:
        """The forward of a module of the unit ends; `before` are the units whose forwards ended before."""
        self.events.append((Event.REACH, unit, before))


# Where in a course an event is; before all others at -1. It is made for every module, so it is a tuple without names.
Spot = tuple[Course, int]
