"""The planner: a pure function from the state of the units and an event to operations and the next state.

    forward of a unit     gather it, unless that was started before; afterwards free it, if it reshards, and if
                          backward does not begin with it
    backward reaches it   finish older reductions, gather it, start to gather the next unit
    backward leaves it    free it, start to reduce its gradients
    backward ends         the rest: units for which no hook ran at the end of backward, running reductions

`advance(spec, order, state, event)` returns the operations and the next state, and has no side effects. The executor
calls it for each event that is new in a state, and caches the result. The plan of a step, its checks and its text use
the same function, so what is shown and checked is what runs.

On an accelerator, gathers and reductions run on streams of their own, and operations name the marks for which they
wait. On CPU, the host waits for results, so it starts gathers early: each forward expects the order of the last one,
and starts to gather the next unit. A large reduction is finished before the next unit is gathered, so that there are at
most two unsharded units and one reduce buffer. Small reductions, which consist of latency, continue meanwhile, and
small units are gathered further ahead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.fsdp.plan.operations import (
    COPIED,
    FOLLOWING,
    FOLLOWING_ALL,
    HANDED_OVER,
    Buffer,
    Kind,
    Mark,
    Operation,
    Stream,
)
from terrazzo.fsdp.plan.state import Phase, Reducing, State, Where
from terrazzo.fsdp.plan.units import Sizes, Spec


def advance(
    spec: Spec, order: tuple[int, ...], state: State, event: tuple[Any, ...]
) -> tuple[tuple[Operation, ...], State]:
    """The operations for `event` in `state`, and the next state; `order` is the order of the last forward."""
    planner = _Planner(spec, order, state)
    getattr(planner, event[0].name.lower())(*event[1:])
    return tuple(planner.operations), planner.result()


class _Planner:
    """Computes one transition: a method for each event, then the steps that they share."""

    def __init__(self, spec: Spec, order: tuple[int, ...], state: State) -> None:
        self.spec, self.order, self.state = spec, order, state
        self.where, self.phase, self.running = list(state.where), list(state.phase), list(state.running)
        self.reducing, self.needed = list(state.reducing), set(state.needed)
        self.changes: dict[str, Any] = {}
        self.operations: list[Operation] = []

    def result(self) -> State:
        return replace(
            self.state,
            where=tuple(self.where),
            phase=tuple(self.phase),
            running=tuple(self.running),
            reducing=tuple(self.reducing),
            needed=frozenset(self.needed),
            **self.changes,
        )

    # ------------------------------------------------------------------ forward

    def forward(self, module: int, in_backward: bool, written: tuple[int, ...]) -> None:
        self.changes["outermost"] = module
        if not in_backward:
            self.changes["entered"] = 0
            if not set(self.order).isdisjoint(self.state.ended):  # of its last forward, which may get no backward
                self.changes["ended"] = ()
        for unit in written:
            self._free(unit)
        self._free_awaited()
        self._show_all()
        if in_backward and self.state.in_backward:  # this model's, where it is computed again
            return
        self._follow()

    def enter(self, module: int, in_backward: bool) -> None:
        unit = self.spec.modules[module]
        first = self.phase[unit] is Phase.IDLE
        if first:
            self.phase[unit] = Phase.FORWARD
            self.running[unit] = sum(1 << other for other, of in enumerate(self.spec.modules) if of == unit)
        spec = self.spec.units[unit]
        if spec.sizes is None:
            return
        self._free_awaited(unit)
        self._gather(unit)
        self._copy_out(unit)
        if first:
            for other in spec.forward_prefetch or ():
                self._gather(other, "prefetch")
            if not self.spec.streams and not in_backward:
                self._follow_order(unit)
        self._use(unit)

    def _follow_order(self, unit: int) -> None:
        at = self.state.entered
        self.changes["entered"] = min(at + 1, len(self.order))
        if self.spec.units[unit].forward_prefetch is None and at < len(self.order) and self.order[at] == unit:
            self._look_ahead(self.order[at + 1 : at + 1 + self.spec.furthest])

    def leave(self, module: int, returns: bool, keep: bool) -> None:
        unit = self.spec.modules[module]
        if self.phase[unit] is Phase.BACKWARD:
            return
        if returns and self.spec.units[unit].sizes is not None and self.state.ended[:1] != (unit,):
            self.changes["ended"] = (unit, *self.state.ended[: self.spec.furthest - 1])
        self.running[unit] &= ~(1 << module)
        if keep:
            self.needed.add(unit)
        if not self.running[unit]:
            self._end_pass(unit, returns)

    def _end_pass(self, unit: int, returns: bool = False) -> None:
        keep = unit in self.needed
        self.needed.discard(unit)
        self.running[unit] = 0
        self.phase[unit] = Phase.IDLE
        spec = self.spec.units[unit]
        if spec.reshard_after_forward and not keep:
            if spec.reshard_inner:
                self._keep(unit)
            elif returns and self._begins_backward(unit):
                self._rest(unit, Where.AWAITED)
            else:
                self._free(unit)

    def _begins_backward(self, unit: int) -> bool:
        """Whether backward is expected to begin with this unit, which would be gathered again at once."""
        spec = self.spec.units[unit]
        stays = spec.stays_if_last and spec.unshard_in_backward and self.where[unit] is Where.UNSHARDED
        return stays and self.order[-1:] == (unit,) and self.order.count(unit) == 1

    def _free_awaited(self, but: int = -1) -> None:
        """Free a unit that is awaited in backward, because something else runs before."""
        for unit, where in enumerate(self.where):
            if where is Where.AWAITED and unit != but:
                self._free(unit)

    def forward_ends(self, in_backward: bool) -> None:
        self.changes["outermost"] = -1
        for unit in range(len(self.where)):
            if self.phase[unit] is Phase.FORWARD:
                self._end_pass(unit)
            if self._is_gathering(unit) and not in_backward:
                self._free(unit)  # this forward was expected to need it

    # ------------------------------------------------------------------ backward

    def _begin_backward(self) -> None:
        if self.spec.streams and self.reducing and not self.state.in_backward:
            # Users may have read and freed gradients since the last backward, which did not wait for its reductions.
            self._emit(Kind.USE, -1, records=HANDED_OVER)
        self.changes["in_backward"] = True

    def reach(self, unit: int, before: tuple[int, ...]) -> None:
        self._show_all()
        self._begin_backward()
        self.phase[unit] = Phase.BACKWARD
        self.changes["ended"] = before
        self.needed.discard(unit)
        spec = self.spec.units[unit]
        self._make_room(0, spec.reduce_buffers)
        if spec.unshard_in_backward:
            self._gather(unit)
            self._copy_out(unit)
        if spec.backward_prefetch is not None:
            for other in spec.backward_prefetch:
                self._gather(other, "prefetch")
        else:
            self._look_ahead(tuple(other for other in before if self.spec.units[other].unshard_in_backward))
        self._use(unit, takes="gradients" if spec.trainable else "")  # the first may be there at once

    def reach_end(self, unit: int) -> None:
        self._show_all()
        self._begin_backward()
        self._leave_backward(unit)

    def _leave_backward(self, unit: int, keep: bool = False) -> None:
        self.phase[unit] = Phase.IDLE
        spec = self.spec.units[unit]
        if spec.sizes is None:
            return
        if spec.trainable:
            self._emit(Kind.USE, unit, "-> gradients", takes="gradients")
        if spec.reshard_after_backward and not keep:
            self._free(unit)
        if not spec.trainable:
            return
        if spec.gradient_sync:
            self._reduce(unit)
        else:
            kept, given = ("accumulated", "gradients") if spec.sizes.accumulated else ("gradients", "")
            self._emit(Kind.ACCUMULATE, unit, f"gradients -> {kept}", takes=kept if given else "", gives=given)

    def record(self) -> None:
        self.changes["records_graph"] = True

    def backward_ends(self, with_gradients: tuple[int, ...]) -> None:
        # A backward through this one's graph may begin inside modules that this one did not leave: nothing would tell,
        # so they stay unsharded. If their parameters got gradients, those are what was asked for.
        graph = self.state.records_graph
        self._begin_backward()
        for unit in reversed(range(len(self.where))):
            spec = self.spec.units[unit]
            ready = unit in with_gradients and spec.gradient_sync
            if self.phase[unit] is Phase.BACKWARD or ready:
                self._leave_backward(unit, keep=graph and unit not in with_gradients)
            elif spec.reshard_after_backward or self._is_gathering(unit):
                self._free(unit)
        self.changes.update(in_backward=False, records_graph=False)
        if self.state.is_last:
            self._end_reductions()
            self.changes.update(ended=(), awaits_step=True)

    def follow(self) -> None:
        if self.spec.streams:
            self.operations.extend(FOLLOWING_ALL)

    def recompute(self, unit: int) -> None:
        self._gather(unit)
        self._copy_out(unit)
        self._use(unit)

    # ------------------------------------------------------------------ between steps

    def last(self, is_last: bool) -> None:
        self.changes["is_last"] = is_last

    def rest(self, units: tuple[int, ...]) -> None:
        for unit in units:
            if self.where[unit] is Where.UNSHARDED:
                self._rest(unit, Where.RESTING)
            elif self.where[unit] is Where.INNER:
                self._emit(Kind.REST, unit)

    def _rest(self, unit: int, where: Where) -> None:
        self.where[unit] = where
        if self.spec.units[unit].aliased:
            self._emit(Kind.REST, unit)
        else:
            self._emit(Kind.REST, unit, "unsharded -> shard", records="freed")

    def step(self) -> None:
        self.changes["awaits_step"] = False

    # ------------------------------------------------------------------ by hand

    def unshard(self, unit: int, at_rest: bool) -> None:
        if at_rest:
            self._follow()
        self._gather(unit)

    def wait(self, unit: int) -> None:
        self._copy_out(unit)

    def reshard(self, unit: int) -> None:
        if self.phase[unit] is Phase.IDLE or len(self.spec.units[unit].groups) < 2:  # else others of its groups run
            self._free(unit)

    def reduce(self) -> None:
        self._begin_backward()
        self.changes["in_backward"] = False
        for unit in reversed(range(len(self.where))):
            spec = self.spec.units[unit]
            if spec.sizes is not None and spec.trainable:
                self._reduce(unit)
        self._end_reductions()

    # ------------------------------------------------------------------ gathers

    def _follow(self) -> None:
        if self.spec.streams:
            self.operations.extend(FOLLOWING)

    def _gather(self, unit: int, why: str = "unshard") -> None:
        """Start to gather the unit, if it is sharded."""
        self._show(unit)
        spec, where = self.spec.units[unit], self.where[unit]
        if spec.sizes is None or where not in (Where.SHARDED, Where.INNER):
            return
        inner = where is Where.INNER
        self.where[unit] = Where.GATHERING_INNER if inner else Where.GATHERING
        if spec.aliased:
            return
        gathered = "gathered, unsharded" if spec.sizes.in_place and not inner else "gathered"
        kept, shard = "kept" if inner else "", "shard" if spec.keeps_part or not inner else ""
        sent = "sent" if shard and spec.sizes.sent else ""
        self._emit(
            Kind.GATHER,
            unit,
            f"{kept}, {shard} -> {gathered}",
            Stream.GATHER,
            takes=f"{sent}, {gathered}",
            gives=sent,
            # An earlier gather's buffer was in this stream's memory, which is reused now; and the kept part was written
            # by the compute stream, or the shard if users wrote to the parameters (else "freed" is not recorded).
            waits=(COPIED, "kept" if inner else "freed"),
            records="gathered",
            moves=spec.sizes.kept_moves if inner else spec.sizes.gather_moves,
            why=why,
        )

    def _copy_out(self, unit: int) -> None:
        where = self.where[unit]
        if not self._is_gathering(unit):
            return
        self.where[unit] = Where.UNSHARDED
        if self.spec.units[unit].aliased:
            self._emit(Kind.COPY_OUT, unit)
            return
        given, gathered = "gathered, kept" if where is Where.GATHERING_INNER else "gathered", ("gathered",)
        uses = "gathered -> unsharded"
        self._emit(Kind.COPY_OUT, unit, uses, takes="unsharded", gives=given, waits=gathered, records=COPIED)

    def _show(self, unit: int) -> None:
        """Register the unsharded parameters of a unit that rests: they are about to be used."""
        if self.where[unit] in (Where.RESTING, Where.AWAITED):
            self.where[unit] = Where.UNSHARDED
            self._emit(Kind.SHOW, unit)

    def _show_all(self) -> None:
        for unit in range(len(self.where)):
            self._show(unit)

    def _use(self, unit: int, takes: str = "") -> None:
        """Forward or backward computes with the unit's parameters."""
        there = self.where[unit] is Where.UNSHARDED
        if there or takes:
            used = "shard" if self.spec.units[unit].aliased else "unsharded"
            self._emit(Kind.USE, unit, used if there else "", takes=takes)

    def _look_ahead(self, units: tuple[int, ...]) -> None:
        """Start to gather the next unit and, on CPU, small units after it, whose latency is longer than their work."""
        room = 0 if self.spec.streams else self.spec.overlapped
        for i, unit in enumerate(units):
            sizes = self.spec.units[unit].sizes
            if sizes is None or self.phase[unit] is not Phase.IDLE:
                continue
            room -= sizes.arriving
            if i and (room < 0 or self.spec.units[unit].double_buffers):
                return
            self._gather(unit, "prefetch")

    def _free(self, unit: int) -> None:
        where = self.where[unit]
        if where is Where.SHARDED:
            return
        self.where[unit] = Where.SHARDED
        if self.spec.units[unit].aliased:
            if where.is_whole:
                self._emit(Kind.FREE, unit)
            return
        if where in (Where.GATHERING, Where.GATHERING_INNER):
            # One of these may have no memory yet.
            self._emit(Kind.DISCARD, unit, gives="gathered, unsharded", waits=("gathered",))
        if where.is_whole:
            self._emit(Kind.FREE, unit, "unsharded -> shard", gives="unsharded", records="freed")
        elif where is not Where.GATHERING:
            self._emit(Kind.FREE, unit, gives="kept", records="freed")

    def _keep(self, unit: int) -> None:
        if self.where[unit] is not Where.UNSHARDED or self.spec.units[unit].aliased:
            return
        self.where[unit] = Where.INNER
        self._emit(Kind.KEEP, unit, "unsharded -> kept, shard", takes="kept", gives="unsharded", records="kept")

    # ------------------------------------------------------------------ reductions

    def _reduce(self, unit: int) -> None:
        spec = self.spec.units[unit]
        gradients = "gradients, accumulated"
        if spec.alone:
            uses = "gradients -> shard gradients"
            self._emit(Kind.HAND_OVER, unit, uses, takes="result", gives=f"{gradients}, result")
            return
        for one in [one for one in self.reducing if one.unit == unit]:  # if a module ran more than once
            self.reducing.remove(one)
            self._finish(self._to_replicas(one))
        one = Reducing(unit, stored=spec.replicated and not spec.all_reduce)
        self._make_room(self._sizes(unit).packed, spec.reduce_buffers)
        self._emit(Kind.PACK, unit, "gradients -> packed", takes="packed", gives=gradients, records="packed")
        more: Any = {"waits": ("packed",), "records": "reduced", "moves": self._sizes(unit).reduce_moves}
        self._emit(Kind.REDUCE, unit, "packed -> reduced", Stream.REDUCE, takes="reduced", **more)
        self.reducing.append(self._to_replicas(one) if self.spec.streams else one)

    def _to_replicas(self, one: Reducing) -> Reducing:
        """After the reduce-scatter, start to reduce over the replicas, if that is due now."""
        unit = one.unit
        if one.to_replicas or one.stored or not self.spec.units[unit].replicated:
            return one
        sizes = self._sizes(unit)
        more: Any = {"waits": ("reduced",), "records": "all-reduced", "moves": sizes.all_reduce_moves}
        if sizes.exchanged:
            more |= {"takes": "exchanged", "gives": "exchanged"}
        self._emit(Kind.ALL_REDUCE, unit, "reduced, partial -> reduced", Stream.ALL_REDUCE, **more)
        return Reducing(unit, one.stored, True, one.released)

    def _finish(self, one: Reducing) -> None:
        """End a reduction: the sharded parameters get their gradients, or its result is kept for later."""
        unit = one.unit
        packed = "" if one.released else "packed"
        stream = Stream.ALL_REDUCE if one.to_replicas else Stream.REDUCE
        # The stream takes new memory: perhaps that of an earlier result, which was added to a gradient and freed.
        marks: Any = {"waits": ("all-reduced" if one.to_replicas else "reduced", HANDED_OVER), "records": "finished"}
        if one.stored:
            stored = "reduced, partial -> partial"
            self._emit(Kind.STORE, unit, stored, stream, takes="partial", gives="reduced", **marks)
            self._emit(Kind.RELEASE, unit, gives=packed, waits=("finished",))
            return
        self._emit(Kind.FINISH, unit, "reduced -> reduced, result", stream, takes="result", **marks)
        given, finished = f"{packed}, reduced, partial, result", ("finished",)
        uses = "result -> shard gradients"
        self._emit(Kind.HAND_OVER, unit, uses, gives=given, waits=finished, records=HANDED_OVER)

    def _make_room(self, following: int, buffers: int = 1) -> None:
        """Finish reductions before `following` bytes are packed, or a unit is gathered in backward.

        Afterwards fewer than `buffers` packed buffers are in use.
        """
        if self.spec.streams:
            # A reduce-scatter overlaps with the next unit's backward, and its all-reduce with the one after that.
            if following:
                for one in [one for one in self.reducing if one.released]:
                    self.reducing.remove(one)
                    self._finish(one)
                most = max(0, len(self.reducing) - buffers + 1)
                self.reducing[:most] = map(self._release, self.reducing[:most])
            return
        self.reducing[:] = map(self._to_replicas, self.reducing)
        under_way = following + sum(self._sizes(one.unit).packed for one in self.reducing)
        while len(self.reducing) >= buffers:
            one = self.reducing[0]
            if under_way <= self.spec.overlapped and not self.spec.units[one.unit].double_buffers:
                return
            del self.reducing[0]
            under_way -= self._sizes(one.unit).packed
            self._finish(one)

    def _release(self, one: Reducing) -> Reducing:
        self._emit(Kind.RELEASE, one.unit, gives="packed", waits=("reduced",))
        return Reducing(one.unit, one.stored, one.to_replicas, True)

    def _end_reductions(self) -> None:
        for one in [self._to_replicas(one) for one in self.reducing]:
            self._finish(one)
        if self.reducing:
            self._emit(Kind.SETTLE, -1)
        self.reducing.clear()

    def _sizes(self, unit: int) -> Sizes:
        sizes = self.spec.units[unit].sizes
        assert sizes is not None
        return sizes

    # ------------------------------------------------------------------ helpers

    def _emit(
        self,
        kind: Kind,
        unit: int,
        uses: str = "",
        stream: Stream = Stream.COMPUTE,
        *,
        takes: str = "",
        gives: str = "",
        waits: tuple[str | Mark, ...] = (),
        records: str | Mark | None = None,
        moves: int = 0,
        why: str = "",
    ) -> None:
        """An operation for the unit. `uses` are the kinds of the unit's buffers that it reads and writes, as in
        "packed -> reduced"; a mark that is text is one of the unit."""
        reads, _, writes = uses.partition("->")
        read, written, taken, given = [_buffers(unit, kinds) for kinds in (reads, writes, takes, gives)]
        marks = tuple([_mark(unit, mark) for mark in waits])
        recorded = None if records is None else _mark(unit, records)
        self.operations.append(Operation(kind, unit, stream, read, written, taken, given, marks, recorded, moves, why))

    def _is_gathering(self, unit: int) -> bool:
        return self.where[unit] in (Where.GATHERING, Where.GATHERING_INNER)


def _buffers(unit: int, kinds: str) -> tuple[Buffer, ...]:
    """The unit's buffers of these kinds, between commas, of which some may be left out."""
    return tuple([Buffer(kind, unit) for each in kinds.split(",") if (kind := each.strip())])


def _mark(unit: int, mark: str | Mark) -> Mark:
    return Mark(mark, unit) if isinstance(mark, str) else mark
