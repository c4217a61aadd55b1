"""The plan of a usual step: forward through all modules in their order, backward in the other, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.fsdp.plan.operations import Buffer, Kind, Operation
from terrazzo.fsdp.plan.planner import advance
from terrazzo.fsdp.plan.state import Event, Phase, State, Where
from terrazzo.fsdp.plan.units import Spec

_OUTER = 0  # the root's module comes first


@dataclass(frozen=True, slots=True)
class Plan:
    """What units do, in the order in which the host asks for it."""

    spec: Spec
    operations: tuple[Operation, ...]

    @property
    def moved(self) -> int:
        """Bytes that a rank sends, on average."""
        return sum(each.moves for each in self.operations)

    def __str__(self) -> str:
        names = [unit.name for unit in self.spec.units]
        width = max((len(name) for name in names), default=4)
        width += 12 * any(each.along for each in self.operations)
        lines = [f"{'stream':10}  {'what':10}  {'group':{width}}  {'bytes sent':>12}  remarks"]
        for each in self.operations:
            if each.kind is Kind.USE:
                continue
            name = names[each.unit] if each.unit >= 0 else ""
            if each.along:
                name = f"{name} and {len(each.along)} more"
            remarks = [each.why] if each.why == "prefetch" else []
            remarks += ["after " + _mark(mark.what, mark.unit, names) for mark in each.waits if self.spec.streams]
            sent = f"{each.moves:,}" if each.moves else ""
            line = f"{each.stream.value:10}  {each.kind.value:10}  {name:{width}}  {sent:>12}  {', '.join(remarks)}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def _mark(what: str, unit: int, names: list[str]) -> str:
    return what if unit < 0 else f"{what} {names[unit]}"


def plan_steps(spec: Spec, steps: int = 1, *, order: Sequence[int] | None = None, micro_batches: int = 1) -> Plan:
    """The operations of `steps` steps in which every module runs once, `order` being that of the last forward."""
    usual = tuple(range(len(spec.units))) if order is None else tuple(order)
    usual = tuple(unit for unit in usual if spec.units[unit].sizes is not None)
    state, found, epoch = State.first(len(spec.units)), [], 0
    for _ in range(steps):
        for batch in range(micro_batches):
            for event in _pass(spec, usual, batch == micro_batches - 1):
                if event[0] is Event.FORWARD and epoch:
                    kept = [u for u, where in enumerate(state.where) if where is not Where.SHARDED]
                    event = (*event[:3], tuple(kept) if batch == 0 else ())
                if event[0] is Event.REACH:
                    event = (event[0], event[1], _before(usual, event[1], spec.furthest))
                if event[0] is Event.REACH_END and state.phase[event[1]] is not Phase.BACKWARD:
                    continue
                operations, state = advance(spec, usual, state, event)
                found += [replace(each, epoch=epoch) if each.kind is Kind.GATHER else each for each in operations]
        epoch += 1
        found += [_write(unit, epoch) for unit in usual]
    return Plan(spec, tuple(found))


def _write(unit: int, epoch: int) -> Operation:
    """What an optimizer does."""
    reads, writes = (Buffer("shard gradients", unit),), (Buffer("shard", unit),)
    return Operation(Kind.WRITE, unit, reads=reads, writes=writes, epoch=epoch)


def _before(order: tuple[int, ...], unit: int, furthest: int) -> tuple[int, ...]:
    if unit not in order:
        return ()
    at = order.index(unit)
    # The root ends last, so nothing was before the others but what runs inside it.
    inner = [each for each in order if each != order[0]]
    if unit == order[0]:
        return tuple(reversed(inner))[:furthest]
    return tuple(reversed([each for each in inner if order.index(each) < at]))[:furthest]


def _pass(spec: Spec, order: tuple[int, ...], last: bool) -> Iterator[tuple[Any, ...]]:
    """Forward and backward of a root around modules that run one after the other."""
    inner = [module for module in range(len(spec.modules)) if module != _OUTER]
    yield (Event.FORWARD, _OUTER, False, ())
    yield (Event.ENTER, _OUTER, False)
    for module in inner:
        yield (Event.ENTER, module, False)
        yield (Event.LEAVE, module, True, False)
    yield (Event.LEAVE, _OUTER, True, False)
    yield (Event.FORWARD_ENDS, False)
    root = spec.modules[_OUTER]
    yield (Event.REACH, root, ())
    reached: list[int] = [root]
    for module in reversed(inner):
        unit = spec.modules[module]
        if unit not in reached:
            reached.append(unit)
            yield (Event.REACH, unit, ())
        if not any(spec.modules[other] == unit for other in inner if other < module):
            yield (Event.REACH_END, unit)
    yield (Event.BACKWARD_ENDS, (), last)
