"""The plan of a step: the planner's operations for the events of a forward, a backward and the optimizer's step.

The events are those of a step that has run; or the expected ones, if modules run in the order in which they are
registered, and those inside others during these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.fsdp.plan.course import Course
from terrazzo.fsdp.plan.operations import Buffer, Kind, Operation
from terrazzo.fsdp.plan.planner import advance
from terrazzo.fsdp.plan.state import Event, Phase, State
from terrazzo.fsdp.plan.units import Spec
from terrazzo.layout.drawing import Shown

Events = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """The operations of a step, in the order in which the host starts them."""

    spec: Spec
    operations: tuple[Operation, ...]

    @property
    def moved(self) -> int:
        """The bytes that a rank sends, on average."""
        return sum(each.moves for each in self.operations)

    def __str__(self) -> str:
        return "\n".join(line for _, line in lines_of(self.operations, self.spec))


def lines_of(operations: Iterable[Operation], spec: Spec) -> Iterator[tuple[Operation | None, str]]:
    """The operations that a reader wants to see, each with a line of text; before them the line of titles."""
    names = [unit.name for unit in spec.units]
    width = max((len(name) for name in names), default=5)
    yield None, f"{'stream':10}  {'what':10}  {'group':{width}}  {'bytes sent':>12}  remarks"
    for each in operations:
        if each.kind is Kind.USE:
            continue
        name = names[each.unit] if each.unit >= 0 else ""
        remarks = [each.why] if each.why == "prefetch" else []
        remarks += [f"after {what} {names[u] if u >= 0 else ''}".rstrip() for what, u in each.waits if spec.streams]
        sent = f"{each.moves:,}" if each.moves else ""
        yield each, f"{each.stream:10}  {each.kind:10}  {name:{width}}  {sent:>12}  {', '.join(remarks)}".rstrip()


def plan_step(spec: Spec, events: Events) -> Plan:
    """The operations for the events of a forward and its backward, of the last micro-batch of a step, after an equal
    one; and of the optimizer's step."""
    order, state = order_of(spec, events), State.first(len(spec.units))
    found: list[Operation] = []
    for event in events:
        if event[0] is Event.FORWARD and not event[2]:
            event = (*event[:3], ())
        operations, state = advance(spec, order, state, event)
        found += operations
    return Plan(spec, (*found, *writes(spec, 1)))


def writes(spec: Spec, epoch: int) -> list[Operation]:
    """The optimizer's writes to the units' shards, which begin this epoch."""
    found = []
    for unit, known in enumerate(spec.units):
        if known.sizes is not None:
            reads, written = (Buffer("shard gradients", unit),), (Buffer("shard", unit),)
            found.append(Operation(Kind.WRITE, unit, reads=reads, writes=written, epoch=epoch))
    return found


def order_of(spec: Spec, events: Events) -> tuple[int, ...]:
    """The units whose forwards begin, in order."""
    state, found = State.first(len(spec.units)), []
    for event in events:
        if event[0] is Event.ENTER and not event[2]:
            unit = spec.modules[event[1]]
            if state.phase[unit] is Phase.IDLE and spec.units[unit].sizes is not None:
                found.append(unit)
        _, state = advance(spec, (), state, event)
    return tuple(found)


# ------------------------------------------------------------------ expected events


# The run of a module: its number, and the runs of modules in it, in order.
Run = tuple[int, tuple["Run", ...]]


def expected(spec: Spec, run: Run) -> Events:
    """The events of a forward of the outermost module and of its backward: those of forward, and then its course,
    backwards, as on a rank whose loss reaches all of it. Some of them depend on the state."""
    events: list[tuple[Any, ...]] = []
    state, course = State.first(len(spec.units)), Course(None, None)

    def tell(*event: Any) -> None:
        nonlocal state
        events.append(event)
        _, state = advance(spec, (), state, event)

    def forward(run: Run, outermost: bool, trained: bool) -> bool:
        """Forward of a module; `trained`, and what is returned: whether any that ran before, or until now, is."""
        module, inside = run
        unit = spec.modules[module]
        known = spec.units[unit]
        if known.sizes is not None and state.phase[unit] is Phase.IDLE and not outermost:
            course.entered(unit)
        tell(Event.ENTER, module, False)
        trained = trained or (known.sizes is not None and known.trainable)
        for each in inside:
            trained = forward(each, False, trained)
        if trained:
            course.left_by(unit, state.ended)
        tell(Event.LEAVE, module, trained, False)
        return trained

    tell(Event.FORWARD, run[0], False, ())
    forward(run, True, False)
    tell(Event.FORWARD_ENDS, False)
    for event in reversed(course.events):
        if state.phase[event[1]] is (Phase.IDLE if event[0] is Event.REACH else Phase.BACKWARD):
            tell(*event)
    tell(Event.BACKWARD_ENDS, ())
    return tuple(events)
