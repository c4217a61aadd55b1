"""When things happen: one schedule per root module decides the order of gathers, frees and reductions.

    forward of a group    gather it, unless that was begun before; afterwards free it, if it is to be resharded
    backward reaches it   end the reduction of the group before, gather it, begin to gather the one that comes next
    backward leaves it    free it, begin to reduce its gradients
    backward ends         whatever is left: groups whose backward nobody saw end, reductions under way

On an accelerator gathers run on a stream of their own and a reduction overlaps with the next group's backward.  On CPU
the host waits for what it needs, so it asks early: each forward follows the order of the last one and begins to gather
what comes next.  A large reduction ends there before the next group is made whole, so that no more than two whole
groups and one reduce buffer exist; small ones, which are all latency, go on meanwhile, and small groups are gathered
further ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from terrazzo._torch.autograd import at_end_of_backward, in_backward
from terrazzo.errors import CommError
from terrazzo.fsdp.streams import GatherStream
from terrazzo.fsdp.watch import Watch

if TYPE_CHECKING:
    from terrazzo.fsdp.reduce import Reduction
    from terrazzo.fsdp.trace import Trace
    from terrazzo.fsdp.unit import Unit


# On CPU, where the host waits: so much may be gathered further ahead than the next group, and be reduced meanwhile.
_OVERLAPPED_BYTES = 1 << 20
_FURTHEST = 4  # groups ahead


class Schedule:
    """What the units of one root share."""

    def __init__(self, units: list[Unit], device: torch.device) -> None:
        self.units = units
        self.device = device
        self.stream = None if device.type == "cpu" else GatherStream(device)
        self.forward_root: Unit | None = None
        self.ended: tuple[Unit, ...] = ()  # whose forwards ended last, the latest first: so their backwards will come
        self.backward_running = False
        self.is_last_backward = True
        self.post_optim_event: Any = None
        self.trace: Trace | None = None
        self.watch = Watch(next((u.group.settings.mesh for u in units if u.group is not None), None))
        self._reductions: list[tuple[Unit, list[Reduction]]] = []
        self._entered: list[Unit] = []  # in this forward, in order
        self._expected: list[Unit] = []  # by the last forward

    # ------------------------------------------------------------------ beginnings and ends

    def begin_forward(self, root: Unit) -> None:
        """Once per forward of the outermost unit: notice what happened to parameters since the last."""
        self.forward_root = root
        if in_backward():
            return
        self._entered = []
        if self.backward_running:
            self.recover()
        self.watch.settle()
        for unit in self.units:
            group = unit.group
            if group is not None:
                if group.is_stale:
                    group.reshard()
                group.adopt()
        if self.stream is not None:
            if self.post_optim_event is not None:
                self.stream.wait_for(self.post_optim_event)
                self.post_optim_event = None
            else:
                self.stream.wait_for_current()

    def end_forward(self, failed: bool = False) -> None:
        """The outermost forward has ended."""
        self.forward_root = None
        for unit in self.units:
            if unit.modules_to_run:
                unit.end_pass()
            if unit.group is not None and unit.group.is_gathering and not in_backward():
                unit.group.reshard()  # this forward was expected to need it
        if failed:
            self.watch.forget()
        elif not in_backward():
            self._expected = self._entered
            self.watch.compare()

    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward begins, and its parameters are there."""
        if not in_backward():
            self.watch.note(unit, "run")
        if unit.forward_prefetch is not None:
            for other in unit.forward_prefetch:
                self.start_unshard(other, "prefetch")
        if self.stream is not None or in_backward():
            return
        self._entered.append(unit)
        at = len(self._entered)
        if unit.forward_prefetch is None and at <= len(self._expected) and self._expected[at - 1] is unit:
            self.look_ahead(self._expected[at : at + _FURTHEST])

    def note_forward(self, unit: Unit) -> None:
        """A unit's forward ended."""
        if not self.ended or self.ended[0] is not unit:
            self.ended = (unit, *self.ended[: _FURTHEST - 1])

    def look_ahead(self, units: Sequence[Unit]) -> None:
        """Begin to gather what comes next and, on CPU, small groups after it: one's latency is longer than its work."""
        room = _OVERLAPPED_BYTES if self.stream is None else 0
        for i, unit in enumerate(units):
            group = unit.group
            if group is None or not unit.is_idle:
                continue
            room -= sum(bucket.gathered_bytes for bucket in group.buckets)
            if i and room < 0:
                return
            self.start_unshard(unit, "prefetch")

    def begin_backward(self) -> None:
        """Once per backward."""
        if not self.backward_running:
            self.watch.settle()
            self.backward_running = True
            at_end_of_backward(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            unit.finish_backward()
        self.backward_running = False
        if self.is_last_backward:
            self.end_reductions()
            for unit in self.units:
                for reducer in unit.reducers:
                    reducer.settle()
            self.ended = ()
        self.watch.compare()

    def recover(self) -> None:
        """The last backward raised: nothing of it is of use."""
        self.backward_running = False
        self.ended = ()
        for _, started in self._reductions:
            for reduction in started:
                reduction.discard()
        self._reductions.clear()
        self._entered = []
        self.watch.forget()
        for unit in self.units:
            unit.abandon()

    # ------------------------------------------------------------------ gathers

    def start_unshard(self, unit: Unit, why: str = "unshard") -> None:
        """Begin to make a unit's parameters whole, if they are not."""
        group = unit.group
        if group is None or group.is_gathering or group.state is group.state.WHOLE:
            return
        self.watch.note(unit, "unshard")
        began = perf_counter() if self.trace is not None else 0.0
        if self.stream is None:
            group.start_unshard(careful=not self.watch.has_agreed)
        else:
            unit.gather_event = self.stream.start(group.start_unshard)
        if self.trace is not None:
            self.trace.add(why, unit.name, group.gather_bytes, began)

    def finish_unshard(self, unit: Unit) -> None:
        """Have a unit's parameters whole and registered."""
        group = unit.group
        if group is None or not group.is_gathering:
            return
        began = perf_counter() if self.trace is not None else 0.0
        try:
            if self.stream is None:
                group.finish_unshard()
            else:
                self.stream.finish(unit.gather_event, group.finish_unshard)
        except CommError as error:
            raise self.watch.explain(error) from error
        if self.trace is not None:
            self.trace.add("wait", unit.name, 0, began)

    def reshard(self, unit: Unit, *, inner: bool = False) -> None:
        """Free a unit's whole parameters, keeping this rank's part over the smaller mesh if `inner`."""
        group = unit.group
        if group is None or group.state is group.state.SHARDED:
            return
        began = perf_counter() if self.trace is not None else 0.0
        if inner:
            group.reshard_inner()
        else:
            group.reshard()
        if self.trace is not None:
            self.trace.add("reshard", unit.name, 0, began)

    # ------------------------------------------------------------------ reductions

    def start_reduction(self, unit: Unit) -> None:
        """Begin to reduce a unit's gradients."""
        self._end_oldest(unit)
        began = perf_counter() if self.trace is not None else 0.0
        started = [one for reducer in unit.reducers if (one := reducer.start()) is not None]
        if started:
            self.watch.note(unit, "reduce")
            self._reductions.append((unit, started))
        if self.trace is not None:
            self.trace.add("reduce", unit.name, sum(r.reduce_bytes for r in unit.reducers), began)

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Reduce, outside of any backward, what backwards have left unreduced."""
        for unit in reversed(self.units):
            if unit.group is not None:
                self.start_reduction(unit)
        self.end_reductions()
        for unit in self.units:
            for reducer in unit.reducers:
                reducer.settle()

    def end_reductions(self) -> None:
        """Wait for the reductions under way, and hand their gradients over."""
        while self._reductions:
            self._end_first()

    def make_room(self) -> None:
        """Before a group becomes whole in backward: on CPU let large reductions end first."""
        if self.stream is None:
            self._end_oldest(None)

    def _end_oldest(self, following: Unit | None) -> None:
        """Have no more under way than may be, with that of `following`: one on an accelerator, small ones on CPU."""
        if self.stream is not None:
            self.end_reductions()
            return
        units = [unit for unit, _ in self._reductions] + ([following] if following is not None else [])
        under_way = sum(reducer.buffer_bytes() for unit in units for reducer in unit.reducers)
        while self._reductions and under_way > _OVERLAPPED_BYTES:
            under_way -= sum(reducer.buffer_bytes() for reducer in self._reductions[0][0].reducers)
            self._end_first()

    def _end_first(self) -> None:
        unit, started = self._reductions.pop(0)
        began = perf_counter() if self.trace is not None else 0.0
        try:
            for reduction in started:
                reduction.finish()
        except CommError as error:
            raise self.watch.explain(error) from error
        if self.trace is not None:
            self.trace.add("gradients", unit.name, 0, began)
