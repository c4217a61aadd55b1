"""From events to operations, and from operations to calls.

The first time that an event occurs in a state, the planner is called, and its operations are compiled to a flat list of
calls. From then on the event costs one look-up in a dict, and the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import record_function

from terrazzo._torch.autograd import profiling
from terrazzo.comm.watch import Watch
from terrazzo.errors import CommError
from terrazzo.fsdp.plan.operations import Kind, Operation
from terrazzo.fsdp.plan.planner import advance
from terrazzo.fsdp.plan.state import State
from terrazzo.fsdp.plan.units import Spec
from terrazzo.fsdp.run.streams import Streams
from terrazzo.fsdp.run.unit import Unit

Call = Callable[[], bool | None]  # False: it has written nothing, so no operation has to wait for its mark

# Called after an operation, or after its start if it does not run on the host, with the time when it began.
Observer = Callable[[Operation, float], None]

_MANY = 4096  # states in the cache; a model whose modules always run in new orders always has new states


class _Node:
    """What the planner plans from: its input, the order of the last forward and a state; and the cached transitions."""

    __slots__ = ("following", "order", "spec", "state")

    def __init__(self, spec: Spec, order: tuple[int, ...], state: State) -> None:
        self.spec, self.order, self.state = spec, order, state
        self.following: dict[tuple[Any, ...], tuple[tuple[Call, ...], _Node, tuple[Operation, ...]]] = {}


class Executor:
    """Runs the operations of one root's units, and keeps their state."""

    def __init__(
        self,
        units: Iterable[Unit],
        state: State,
        watches: tuple[Watch, Watch],
        streams: Streams | None,
        observers: Sequence[Observer],
        stepped: Any = None,
    ) -> None:
        """`plan_with` follows. `watches` are those of the ranks that shard and of the replicas. `stepped` is an
        event of the user's, for which the next forward's gathers wait instead of for all that is queued."""
        self.units = {unit.index: unit for unit in units}  # by their numbers
        self.watch, self.watch_replicas = watches
        self.streams, self._observers = streams, observers
        self.stepped = stepped
        self._nodes: dict[tuple[Spec, tuple[int, ...], State], _Node] = {}
        self._node = _Node(Spec((), False), (), state)

    @property
    def spec(self) -> Spec:
        """The planner's input."""
        return self._node.spec

    @property
    def state(self) -> State:
        """The state of the units."""
        return self._node.state

    def plan_with(self, spec: Spec) -> None:
        """Use this spec from now on."""
        self._node = self._node_of(spec, self._node.order, self._node.state)

    def expect(self, order: tuple[int, ...]) -> None:
        """Expect units to run in this order from now on."""
        if order != self._node.order:
            self._node = self._node_of(self.spec, order, self._node.state)

    def _node_of(self, spec: Spec, order: tuple[int, ...], state: State) -> _Node:
        key = (spec, order, state)
        found = self._nodes.get(key)
        if found is None:
            if len(self._nodes) >= _MANY:
                self._nodes.clear()
            found = self._nodes[key] = _Node(*key)
        return found

    def advance(self, event: tuple[Any, ...]) -> None:
        """Run the operations that follow an event."""
        node = self._node
        found = node.following.get(event)
        if found is None:
            operations, state = advance(node.spec, node.order, node.state, event)
            calls = tuple(call for each in operations if (call := self.call_of(each)) is not None)
            found = node.following[event] = (calls, self._node_of(node.spec, node.order, state), operations)
        try:
            if self._observers or profiling():
                self._run_observed(found[2])
            else:
                for call in found[0]:
                    call()
        except BaseException as error:
            self.reset(gradients=node.state.in_backward)
            if isinstance(error, CommError):
                raise self.watch.explain(error) from error
            raise
        self._node = found[1]

    def _run_observed(self, operations: tuple[Operation, ...]) -> None:
        for each in operations:
            began = perf_counter()
            call = self.call_of(each)
            if call is not None:
                with record_function(self._name_of(each)):
                    call()
            for observer in self._observers:
                observer(each, began)

    def _name_of(self, operation: Operation) -> str:
        """The operation's name in a profile."""
        unit = self.units.get(operation.unit)
        return f"fully_shard: {operation.kind.value}{'' if unit is None else f' {unit.name}'}"

    def reset(self, *, gradients: bool) -> None:
        """After a failure: reshard everything, and drop running communication."""
        node = self._node
        self._node = self._node_of(node.spec, node.order, node.state.anew())
        # Other errors are suppressed: the first one is being raised, and a broken group fails at the next collective.
        if self.streams is not None:
            with suppress(Exception):
                self.streams.join()
        for unit in self.units.values():
            with suppress(Exception):
                unit.reset(node.state.where[unit.index], gradients=gradients)

    # ------------------------------------------------------------------ calls

    def call_of(self, operation: Operation) -> Call | None:
        """The call for an operation; None if there is nothing to do."""
        call = self._plain_call(operation)
        if self.streams is not None:
            if operation.kind is Kind.QUEUED:
                return self._begin_step
            if call is None and not operation.waits and operation.records is None:
                return None
            return self.streams.on_stream(operation, call)
        return call

    def _plain_call(self, operation: Operation) -> Call | None:
        kind = operation.kind
        if kind in (Kind.USE, Kind.QUEUED, Kind.FOLLOW, Kind.WRITE):
            return None
        if kind is Kind.SETTLE:
            return self._settle
        unit = self.units[operation.unit]
        if kind is Kind.GATHER:
            return _noted(unit.gather_kept if operation.is_inner else unit.gather, self.watch, unit, "unshard")
        call: Call = getattr(unit, kind.name.lower())
        if kind is Kind.REDUCE:
            return _noted(call, self.watch, unit, "reduce")
        return _noted(call, self.watch_replicas, unit, "all-reduce") if kind is Kind.ALL_REDUCE else call

    def _begin_step(self) -> None:
        assert self.streams is not None
        stepped, self.stepped = self.stepped, None
        self.streams.begin_step(stepped)

    def _settle(self) -> None:
        for unit in self.units.values():
            unit.settle()


def _noted(call: Callable[[], object], watch: Watch, unit: Unit, what: str) -> Call:
    def run() -> None:
        watch.note(unit, what)
        call()

    return run


def streams_for(device: torch.device) -> Streams | None:
    """The streams of an accelerator; None on CPU."""
    return None if device.type == "cpu" else Streams(device)
