"""A backward that runs: what this rank's hooks report, and what it does for other ranks on the course that all keep."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from terrazzo.errors import FSDPError
from terrazzo.fsdp.misuse import shown
from terrazzo.fsdp.plan.course import Course, Spot
from terrazzo.fsdp.plan.state import Event, Phase, Where
from terrazzo.fsdp.run.memory import free_memory_aside
from terrazzo.fsdp.run.unit import Unit


class Backward:
    """What this rank knows of a backward, from its first hook to its end."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._courses: list[Course] = []  # those of the forwards that it has reached
        self.reached: set[int] = set()  # the units that it has reached, on this rank
        # Those of them that it leaves at its end only: it enters their modules through an earlier backward or through
        # tangents, and may not have left these when it leaves the forward. Autograd orders what one thread has
        # recorded, and the backwards of an accelerator have another thread than the forwards.
        self.staying: set[int] = set()
        self._unnoticed: list[str] = []  # the names of those through which it ran without notice

    def come_to(self, spot: Spot | None, records_graph: bool) -> None:
        """Called when backward comes to a spot: do what lies before it, which this rank's loss does not depend on."""
        if records_graph and not self._root.state.records_graph:
            self._root.advance_without_graph((Event.RECORD,))
        if spot is None:  # not in a forward
            return
        course, at = spot
        if not self._courses or course is not self._courses[-1]:
            self._begin(course)
        if at + 1 < course.left:
            self._follow(course, at + 1)
        if at < course.left:
            course.left = at if at > 0 else 0

    def _begin(self, course: Course) -> None:
        """Called when backward comes to another forward."""
        if course.model is not self._root:  # the module has another root now
            course.left = 0
        elif course.units is not self._root.executor.units:
            raise FSDPError(
                f"rank {dist.get_rank()}: a second backward ran through a forward after which settings of some modules "
                "had been changed, so that these are gathered in other messages now: change settings after the last "
                "backward, or call set_coalesce_bytes(0) on the model"
            )
        elif course not in self._courses:
            for each in self._courses:  # later forwards, through which backward has run
                self._follow(each)
            course.left = len(course.events)
            self._courses.append(course)

    def _follow(self, course: Course, until: int = 0) -> None:
        """Do the events of a course that no hook on this rank has done, down to `until`."""
        root = self._root
        while course.left > until:
            course.left -= 1
            kind, unit, *more = course.events[course.left]
            phase = root.state.phase[unit]
            if kind is Event.REACH and phase is Phase.IDLE:
                self._look_for_unnoticed(unit)
                self._reach(unit, *more)
            elif kind is Event.REACH_END and phase is Phase.BACKWARD:
                # Backward through this one, or through tangents, may be in it.
                if unit not in self.staying and not (root.state.records_graph and unit in self.reached):
                    root.advance_without_graph((kind, unit))

    def reach(self, unit: int, before: tuple[int, ...]) -> None:
        """Called when backward reaches a unit; `before` are the units that ran before it, the latest first."""
        if self._root.state.phase[unit] is not Phase.BACKWARD:
            if len(self._root.executor.units[unit].modules) > 1:
                self._look_for_unnoticed(unit)  # of another of its modules
            self._reach(unit, before)
        self.reached.add(unit)

    def leave(self, unit: Unit) -> None:
        """Called when backward leaves the unit's modules through an input."""
        if unit.index in self.staying:
            return
        if self._root.state.phase[unit.index] is Phase.BACKWARD or unit.has_gradients():
            self._look_for_unnoticed(unit.index)
            self._root.advance_without_graph((Event.REACH_END, unit.index))

    def _reach(self, unit: int, before: tuple[int, ...]) -> None:
        self._root.advance_without_graph((Event.REACH, unit, before))
        if all(self._root.state.where[each] is Where.UNSHARDED for each in before):
            free_memory_aside()  # the next ones are there already, or there are none

    def end(self) -> tuple[int, ...]:
        """Called at its end: do what no hook has done; returns the units that have gradients."""
        for course in self._courses:
            self._follow(course)
        units = self._root.units
        found = tuple([unit.index for unit in units if unit.has_gradients() or self._waits_for_replicas(unit)])
        for index in found:
            self._look_for_unnoticed(index)
        return found

    def passed(self) -> set[int]:
        """The units that it may have run through, on any rank."""
        return self.reached.union(event[1] for course in self._courses for event in course.events)

    def _waits_for_replicas(self, unit: Unit) -> bool:
        """Whether a unit has gradients from an earlier backward that must be reduced over the replicas now."""
        known, running = self._root.executor.spec.units[unit.index], self._root.state.reducing
        waits = known.replicated and known.all_reduce and unit.has_partial()
        return waits and all(unit.index != one.unit for one in running)

    def _look_for_unnoticed(self, index: int) -> None:
        """Note a unit with gradients if backward ran through its modules without a hook that said so, while its
        parameters were freed.

        Freed parameters read as NaN. Where they were about to be received in place, they may read as anything.
        """
        unit, where = self._root.executor.units[index], self._root.state.where[index]
        if index in self.reached or where.is_whole or self._root.executor.spec.units[index].aliased:
            return
        if unit.waiting or unit.has_partial() or not unit.with_own_gradients():
            return
        arriving = where is Where.GATHERING and unit.in_place
        if arriving or any(gradients.have_nan() for gradients in unit.gradients):
            self._unnoticed.append(unit.name)

    def fault(self) -> str | None:
        """What makes the gradients of this backward wrong, or None."""
        lost = [name for unit in self._root.units for name in unit.with_gradients_of_kept_parts()]
        if lost:
            return (
                f"backward gave gradients to the parts of parameters ({shown(lost)}) that reshard_after_forward=n "
                "keeps between forward and backward, where the optimizer does not see them: something was computed "
                "from model.parameters() between forward and backward. Compute it before forward, or in a module, or "
                "pass reshard_after_forward=True"
            )
        if self._unnoticed:
            return (
                f"backward computed gradients of {self._unnoticed} without notice, when their parameters were "
                "freed: an output of the module reached the loss in an object that fully_shard does not look into, or "
                "as an attribute. Return tensors, also in tuples, lists, sets, dicts, dataclasses or pytrees; or keep "
                "the parameters with reshard_after_forward=False"
            )
        return None
