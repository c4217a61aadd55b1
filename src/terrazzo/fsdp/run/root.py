"""The root: the shared state of a model's units, and the beginnings and ends of its forwards and backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, replace
from enum import Enum
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from terrazzo._torch.autograd import at_end_of_backward, functorch_active, in_backward, outside_transforms
from terrazzo.comm.mesh import ranks_of
from terrazzo.comm.watch import Watch
from terrazzo.errors import FSDPError
from terrazzo.fsdp.group import Group, group_of, with_switches
from terrazzo.fsdp.misuse import note_model, remark_on_single_group, remark_on_unsharded_gradients, shown
from terrazzo.fsdp.plan.course import Course, Spot
from terrazzo.fsdp.plan.operations import Stream
from terrazzo.fsdp.plan.state import Event, State, Where
from terrazzo.fsdp.plan.step import Events
from terrazzo.fsdp.plan.units import Spec, Switches, UnitSpec
from terrazzo.fsdp.run.backward import Backward
from terrazzo.fsdp.run.comm import buffers_for
from terrazzo.fsdp.run.executor import Executor, Observer, streams_for
from terrazzo.fsdp.run.forming import differ, form, part, runs_of
from terrazzo.fsdp.run.memory import free_memory_aside
from terrazzo.fsdp.run.streams import Streams
from terrazzo.fsdp.run.unit import Unit

# The most events of a forward and its backward that are kept for `explain`.
_MOST_EVENTS = 1 << 14

# The most combinations of switches whose input of the planner is kept.
_MOST_SPECS = 64


# A forward gathers these in any case.
_FREED = (Where.SHARDED, Where.AWAITED)


class _Forming(Enum):
    """The changes to units that are due before the next forward."""

    PARTS = "part those of different settings"
    JOINS = "form all again"


class Root:
    """The groups of a module and of all modules in it, and of other models that share modules with it.

    `tops` are the groups of the outermost modules of these models.
    """

    def __init__(self, groups: Sequence[Group], tops: Sequence[Group]) -> None:
        self.groups, self.tops = tuple(groups), tuple(tops)
        device = groups[0].settings.mesh.device
        streams = streams_for(device)
        self.device = device
        mesh = next((group.settings.mesh for group in groups if group.params), None)
        shard, replicate = (None, None) if mesh is None else (mesh.shard, mesh.replicate)
        ranks = [] if mesh is None else ranks_of(mesh.mesh)
        # Ranks that shard must run the same modules in each step. Replicas may accumulate gradients over different
        # numbers of micro-batches, so they only compare what they reduce among them.
        self.watch = Watch(shard, ranks, streams, Stream.REDUCE, device)
        self.watch_replicas = Watch(replicate, ranks, streams, Stream.ALL_REDUCE, device)
        modules = [module for group in groups for module in group.modules]
        self.positions = {module: i for i, module in enumerate(modules)}  # the numbers of modules in events
        self.observers: list[Observer] = []
        # A former root may have left parameters unsharded.
        formers = [(group.unit, group.root) for group in groups]
        where = {unit: Where.SHARDED if root is None else root.state.where[unit.index] for unit, root in formers}
        for position, group in enumerate(groups):
            group.place = group.place._replace(root=self, position=position)
        self._use(where, State.first(len(groups)), streams)
        self._forming: _Forming | None = _Forming.PARTS
        self._courses_made: WeakSet[Course] = WeakSet()  # those of forwards whose graphs exist
        self.course: Course | None = None  # of this forward
        self.backward: Backward | None = None  # that runs
        self._ran: set[int] = set()  # the units whose forwards began since the last backward
        # The order of units in the last forward of each outermost module.
        self._orders: dict[int, tuple[int, ...]] = {}
        self._specs: dict[tuple[Switches, ...], Spec] = {}  # by the groups' switches, since sizes last changed
        self._compared: tuple[str, ...] | None = None  # the settings, until something changes
        self._stale = True  # whether plans must be made from another `spec`
        self._passing: deque[tuple[Any, ...]] = deque(maxlen=_MOST_EVENTS)  # events since the last forward began
        self.passes: dict[int, Events] = {}  # by outermost module, the events of its last forward with a backward

    @property
    def units(self) -> Collection[Unit]:
        return self.executor.units.values()

    @property
    def streams(self) -> Streams | None:
        return self.executor.streams

    def _use(self, units: Mapping[Unit, Where], state: State, streams: Streams | None, stepped: Any = None) -> None:
        """Have these units from now on, where they are, and else in this state."""
        where = [Where.SHARDED] * len(self.groups)
        for unit, now in units.items():
            where[unit.index] = now
        state, watches = replace(state, where=tuple(where)), (self.watch, self.watch_replicas)
        self.executor = Executor(units, state, watches, streams, self.observers, stepped)

    # ------------------------------------------------------------------ which groups share a unit

    def coalesce(self, nbytes: int) -> None:
        """Units have at most so many bytes of parameters, or one group, from now on, or from the next forward on."""
        for group in self.groups:
            group.options = replace(group.options, coalesce_bytes=nbytes)
        self._forming = _Forming.JOINS
        self.form_units()

    def form_units(self) -> None:
        """Form units again, if that is to be done, or part those whose settings differ now.

        Units get new memory for unsharded parameters, so it is done between steps, when no graph refers to what they
        had. Groups that were parted stay so, until `coalesce` is called.
        """
        if self._forming is None or not self._is_idle or self.backward is not None:
            return
        many = [self.groups] if self._forming is _Forming.JOINS else [unit.groups for unit in self.units]
        runs = [run for groups in many for run in runs_of(groups)]
        former = [unit for unit in self.units if unit.groups not in runs]
        open_now = any(course.left for course in self._courses_made)  # whose backward has not run to its end
        if former and (open_now or self._holds_gradients(former)):
            return
        for unit in former:
            if self.state.where[unit.index] is not Where.SHARDED:
                self.reshard(unit)
            if unit.adopt(unit.replaced()):
                self._resize()
        if len({param.values.device.type for unit in former for param in unit.params}) > 1:
            return  # only some are materialised
        self._forming = None
        if not former:
            return
        with torch.inference_mode(False):
            units = form(runs)
        where = {unit: self.state.where[unit.index] if unit in self.units else Where.SHARDED for unit in units}
        self._use(where, self.state.anew(), self.streams, self.executor.stepped)
        self._orders.clear()
        self.passes.clear()
        self._resize()

    def _holds_gradients(self, units: Sequence[Unit]) -> bool:
        """Whether there are reductions of these units that have begun and not ended."""
        running = {one.unit for one in self.state.reducing}
        return any(unit.index in running or unit.has_partial() for unit in units)

    def _check_units(self) -> None:
        """Raise if groups of a unit must be reduced in different ways."""
        for unit in self.units:
            if differ(unit.groups):
                self._courses_made.clear()  # no backward runs through these again
                names = shown([group.name for group in unit.groups])
                raise FSDPError(
                    f"rank {dist.get_rank()}: settings of one of the modules {names} "
                    "were changed between a forward and its backward, but these small modules are gathered and "
                    "reduced in one message: change settings before forward, or call set_coalesce_bytes(0) on the model"
                )

    # ------------------------------------------------------------------ the planner's input

    def changed(self, *, sizes: bool) -> None:
        """Called when a setting has changed, and perhaps `sizes`: plans must be made again, and perhaps units."""
        self._stale = True
        self._compared = None
        if sizes:
            self._specs.clear()
        if self._forming is None:
            self._forming = _Forming.PARTS

    def _resize(self) -> None:
        """Note that sizes have changed, so that plans must be made again."""
        self._specs.clear()
        self._stale = True
        self._compared = None

    def _spec_now(self) -> Spec:
        """`spec`, made once for these switches: programs turn some of them in every step."""
        if len(self._specs) >= _MOST_SPECS:
            self._specs.clear()
        key = tuple([unit.groups[0].switches for unit in self.units])
        found = self._specs.get(key)
        if found is None:
            found = self._specs[key] = self.spec()
        return found

    def spec(self) -> Spec:
        """The input of the planner."""
        units = [UnitSpec(group.name) for group in self.groups]
        for unit in self.units:
            units[unit.index] = self._unit_spec(unit)
        modules = tuple([group.unit.index for group in self.groups for _ in group.modules])
        return Spec(tuple(units), self.streams is not None, modules)

    def _settings(self) -> tuple[str, ...]:
        """What must be equal on all ranks that shard, so that they reduce the same in backward: the trained parameters
        of each unit, and what is switched on."""
        if self._compared is None:
            found = []
            for unit in self.units:
                if unit.params:
                    trained = sum(param.requires_grad << i for i, param in enumerate(unit.params))
                    on = [name for name, value in asdict(unit.groups[0].switches).items() if value is True]
                    found.append(f"{unit.name} with trained parameters {trained:#b}, {', '.join(on)}")
            self._compared = tuple(found)
        return self._compared

    def _unit_spec(self, unit: Unit) -> UnitSpec:
        group, aliased = unit.groups[0], all(bucket.will_alias for bucket in unit.buckets)
        switches = asdict(group.switches)
        if not unit.has_replicas:  # scalars are reduced like the other parameters, whatever users set for replicas
            switches["all_reduce"] = True
        return UnitSpec(
            name=unit.name,
            sizes=unit.sizes() if unit.params else None,
            trainable=any(gradients.plan() is not None for gradients in unit.gradients),
            aliased=aliased,
            alone=all(gradients.alone for gradients in unit.gradients),
            replicated=any(gradients.over_replicas for gradients in unit.gradients),
            stays_if_last=all(each.options.auto_reshard for each in unit.groups) and not aliased,
            keeps_part=bool(group.inner) and any(b.settings.mesh not in group.inner for b in unit.buckets),
            forward_prefetch=_units_of([each.options.forward_prefetch for each in unit.groups]),
            backward_prefetch=_units_of([each.options.backward_prefetch for each in unit.groups]),
            reduce_buffers=group.options.reduce_buffers,
            double_buffers=any(buffers_for(group.options, b.settings.mesh.shard) is not None for b in unit.buckets),
            groups=tuple([i for i, each in enumerate(self.groups) if each.unit is unit]),
            **switches,
        )

    @property
    def state(self) -> State:
        return self.executor.state

    def advance(self, event: tuple[Any, ...]) -> None:
        """Do what follows an event; inside `torch.func`'s transforms too, which would wrap what it computes."""
        if functorch_active():
            with outside_transforms():
                self.advance(event)
            return
        if self._stale:
            self._stale = False
            self.executor.plan_with(self._spec_now())
        self._passing.append(event)
        try:
            self.executor.advance(event)
        except BaseException:
            self.backward = None
            raise

    def advance_without_graph(self, event: tuple[Any, ...]) -> None:
        """`advance` in backward, where autograd may be recording (`create_graph`)."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.advance(event)
        else:
            self.advance(event)

    # ------------------------------------------------------------------ forward

    def begin_forward(self, module: int) -> None:
        """Once per forward of the outermost module: notice what happened to parameters since the last."""
        if functorch_active():
            with outside_transforms():
                self.begin_forward(module)
            return
        inside = in_backward()
        if inside and self.backward is not None:  # computed again
            self.advance((Event.FORWARD, module, True, ()))
            return
        if not inside:  # or inside the backward of another computation, which may be all that ever runs this model
            self._begin_step(module)
        replaced = {unit: unit.replaced() for unit in self.units}
        kept = [unit for unit in self.units if self.state.where[unit.index] not in _FREED]
        for unit in kept:
            self.save_writes(unit)
        self.advance((Event.FORWARD, module, inside, self._written(kept, replaced)))
        try:
            placed = flags = False
            for unit, found in replaced.items():
                if unit.params and (found or self.state.where[unit.index] is Where.SHARDED):
                    placed |= unit.adopt(found)
                else:
                    flags |= unit.follow_flags()
            if placed:
                self.executor.advance((Event.FOLLOW,))
            if placed or flags:
                self._resize()
        except BaseException:
            self.executor.reset(gradients=False)
            raise

    def _begin_step(self, module: int) -> None:
        if self.backward is not None:
            self.recover()
        self.form_units()
        self._passing.clear()
        self.course = Course(self, self.executor.units)
        self._courses_made.add(self.course)
        self.settle()
        self.executor.expect(self._orders.get(module, ()))

    def _rest(self, wanted: Callable[[Unit], bool]) -> None:
        """Register the sharded parameters of `wanted` units that are unsharded, or of which a part is kept.

        Optimizers, clipping and users then see the tensors that have the gradients and the newest values, in
        `parameters()` too. The others stay in memory, so nothing has to be gathered again unless shards are written
        to.
        """
        where = self.state.where
        resting = [u.index for u in self.units if where[u.index] in (Where.UNSHARDED, Where.INNER) and wanted(u)]
        if resting:
            self.advance((Event.REST, tuple(resting)))

    def before_step(self, ids: Set[int]) -> None:
        """Before an optimizer writes to the shards with these ids: save what was written to unsharded parameters."""
        if not self._is_idle:
            return
        self.settle()  # also for an optimizer that has none of them: it may have copies
        if not self._has_any(ids):  # of another model, which another thread may train
            return
        if self.state.awaits_step:
            self.executor.advance((Event.STEP,))
        for unit in self.units:
            self.save_writes(unit)
            if unit.groups[0].switches.gradient_sync and self.state.is_last and not unit.waiting:
                remark_on_unsharded_gradients([p.name for p in unit.with_own_gradients() if id(p.sharded) in ids])

    def after_step(self, ids: Set[int]) -> None:
        """After an optimizer has written to the shards with these ids."""
        for unit in self.units:
            unit.note_step(ids)
        if self._is_idle and self._has_any(ids):
            self._rest(Unit.was_written)

    def _has_any(self, ids: Set[int]) -> bool:
        """Whether one of these ids is that of a shard of the model."""
        return any(id(param.sharded) in ids for unit in self.units for param in unit.params)

    @property
    def _is_idle(self) -> bool:
        return self.state.outermost < 0 and not self.state.in_backward

    def _written(self, kept: Sequence[Unit], replaced: Mapping[Unit, object]) -> tuple[int, ...]:
        """Of units that are not sharded, those whose shards some rank has written since they were gathered."""
        if not kept:
            return ()
        written = [unit.written(bool(replaced.get(unit)), self.state.where[unit.index]) for unit in kept]
        flags = self.watch.agree(written, kept)
        return tuple([unit.index for unit, flag in zip(kept, flags, strict=True) if flag])

    def save_writes(self, unit: Unit) -> None:
        """Copy to the shards what users have written to unsharded parameters, if these have values."""
        if self.state.where[unit.index].is_whole:
            unit.save_writes()

    def enter(self, unit: Unit, outermost: bool) -> Spot | None:
        """Called when a unit's forward begins; returns the spot where backward leaves it, if one may."""
        self.watch.note(unit, "run")
        if self.course is None:
            return None
        self.course.order.append(unit.index)
        if not torch.is_grad_enabled():
            return None
        self._ran.add(unit.index)
        return (self.course, -1) if outermost else self.course.entered(unit.index)

    def settle(self, *, wait: bool = False) -> None:
        """Raise if ranks differ, as far as is known."""
        self.watch.settle(wait=wait)
        self.watch_replicas.settle(wait=wait)

    def end_forward(self, failed: bool = False) -> None:
        """Called when the outermost forward has ended."""
        inside, module = in_backward(), self.state.outermost
        self.advance((Event.FORWARD_ENDS, inside))
        if inside:  # computed again, and perhaps not to the end
            return
        self._wait_for_reads()
        course, self.course = self.course, None
        if self.state.awaits_step and not torch.is_grad_enabled():
            self._rest(Unit.has_sharded_gradients)
        if failed or course is None:
            self.watch.forget()
        else:
            order = self._orders[module] = tuple(course.order)
            self.executor.expect(order)
            self.watch.forwards += 1
            self.watch.compare(settings=self._settings())

    def _wait_for_reads(self) -> None:
        """Wait until gathers have read the shards in pinned memory: the host may write there next, and at once."""
        if self.streams is not None and any(unit.params and unit.settings.pinned_shards for unit in self.units):
            self.streams.wait_for(Stream.GATHER)

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> Backward:
        """Called once per backward."""
        if self._forming is not None:
            self._check_units()
        found = self.backward = Backward(self)
        if self.streams is not None and any(unit.params and unit.was_written_since_forward() for unit in self.units):
            self.executor.advance((Event.FOLLOW,))  # perhaps by an optimizer's step: gathers wait for it
        self.settle()
        self._follow_writes()
        at_end_of_backward(self._end_backward)
        return found

    def _follow_writes(self) -> None:
        """Notice what users have frozen since forward, which gets no gradients in this backward, and what they have
        written to shards whose unsharded parameters are still there: it is gathered again."""
        if functorch_active():
            with outside_transforms():
                self._follow_writes()
            return
        awaited = [unit for unit in self.units if self.state.where[unit.index] is Where.AWAITED]
        for index in self._written(awaited, {}):
            self.advance_without_graph((Event.RESHARD, index))
        changed = [unit.follow_flags() for unit in self.units]
        if any(changed):
            self._resize()

    @torch.no_grad()
    def _end_backward(self) -> None:
        backward = self.backward
        if backward is None:  # it has failed
            return
        with_gradients = backward.end()
        self.backward = None
        self.advance((Event.BACKWARD_ENDS, with_gradients))
        self._wait_for_reads()
        if self._passing[0][0] is Event.FORWARD:
            self.passes[self._passing[0][1]] = tuple(self._passing)
        self._passing.clear()
        kept = self._ran | backward.passed() | set(with_gradients)
        self._ran.clear()
        if self.state.is_last:
            self._rest(lambda unit: unit.has_sharded_gradients() or unit.was_written())
        for unit in self.units:
            # On all ranks, also on those that got no gradients, so that all take part when they are reduced.
            if not self.executor.spec.units[unit.index].gradient_sync and unit.index in kept:
                unit.keep_gradients()
        self.watch.compare()
        self.watch_replicas.compare(always=False)
        fault = backward.fault()
        if fault is not None:
            self.recover()
            raise FSDPError(fault)

    def recover(self) -> None:
        """The last backward raised: nothing of it is of use."""
        self.course = self.backward = None
        self.watch.forget()
        self.watch_replicas.forget()
        self.executor.reset(gradients=True)
        free_memory_aside()

    def give_up(self) -> None:
        """Have no units: another root has them, whose streams know no marks of these."""
        self._join()
        self._use({}, self.state, self.streams)

    def share_streams_of(self, other: Root) -> None:
        """Communicate on the streams of another root."""
        self._join()
        for watch in (self.watch, self.watch_replicas):
            watch.follow(other.streams)
        where = {unit: self.state.where[unit.index] for unit in self.units}
        self._use(where, self.state, other.streams, self.executor.stepped)
        self._resize()

    def _join(self) -> None:
        if self.streams is not None:
            self.streams.join()

    # ------------------------------------------------------------------ called by users

    def set_is_last(self, is_last: bool) -> None:
        """Whether the next backward is the last before an optimizer's step."""
        if is_last is not self.state.is_last:
            self.executor.advance((Event.LAST, is_last))

    def unshard(self, group: Group) -> None:
        """Start to gather a group; between steps without others."""
        at_rest = self._is_idle
        if at_rest and len(group.unit.groups) > 1 and not self._courses_made:
            group.options = replace(group.options, apart=True)
            self.changed(sizes=True)
            self.form_units()
        self._unshard(group.unit, at_rest)

    def unshard_all(self) -> None:
        """Gather all units, between steps."""
        self.form_units()
        for unit in self.units:
            self._unshard(unit, True)
        for unit in self.units:
            self.advance((Event.WAIT, unit.index))

    def _unshard(self, unit: Unit, at_rest: bool) -> None:
        if unit.params and at_rest:
            self.follow(unit)
        self.advance((Event.UNSHARD, unit.index, at_rest))

    def reshard(self, unit: Unit) -> None:
        """Have sharded parameters registered."""
        if self._is_idle:
            self.save_writes(unit)
        self.advance((Event.RESHARD, unit.index))
        if self._is_idle:
            free_memory_aside()

    def follow(self, unit: Unit, *, partly: bool = False) -> None:
        """Take over parameters of a unit that users have replaced."""
        found = unit.replaced()
        if self.state.where[unit.index] is not Where.SHARDED:
            self.save_writes(unit)
            if self._written([unit], {unit: found}):
                self.advance((Event.RESHARD, unit.index))
        if self.state.where[unit.index] is Where.SHARDED:
            if unit.adopt(found, partly=partly):
                self._resize()


def _units_of(groups: Sequence[tuple[Group, ...] | None]) -> tuple[int, ...] | None:
    """The units of all these groups; None if there are no lists."""
    known = [each for each in groups if each is not None]
    return tuple(dict.fromkeys(group.unit.index for each in known for group in each)) if known else None


def root_of(group: Group) -> Root:
    """The root of a group. A group without one becomes the root of the modules in it."""
    found: Root | None = group.root
    return found if found is not None else _become_root(group)


def _become_root(group: Group) -> Root:
    if len(group.modules) > 1:
        raise FSDPError(
            f"the modules {[type(m).__name__ for m in group.modules]} were sharded as one group, but no module that "
            "contains them was: call fully_shard on the module that contains them, too"
        )
    module = group.modules[0]
    groups: dict[int, Group] = {}
    for name, inner in module.named_modules():
        found = group_of(inner)
        if found is not None:
            if id(found) not in groups:
                own_name = name or type(module).__mro__[2].__name__  # the original class's
                found.place = found.place._replace(name=own_name)
            groups[id(found)] = found
    own = list(groups.values())
    formers = list(dict.fromkeys(each.root for each in own if each.root is not None))
    # Models that share modules with this one must have one root together with it.
    members = list(dict.fromkeys([*own, *[other for former in formers for other in former.groups]]))
    tops = [group, *[top for former in formers for top in former.tops if id(top) not in groups]]
    for each in members:
        if each.root is not None and each.root.state.in_backward:
            raise FSDPError(f"{each.name!r} cannot become part of a larger model during its backward")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for unit in dict.fromkeys(each.unit for each in members):  # other groups of theirs have another root, or none yet
        part(unit, lambda each: each in members)
    for param in [param for each in members for param in each.params]:
        param.explain(names.get(id(param.sharded), param.name))
    root = Root(members, tops)
    note_model(root)
    for former in formers:
        former.give_up()
    for each in members:
        if each.options.auto_reshard:  # backward would gather the root's parameters again at once
            each.switches = with_switches(each.switches, reshard_after_forward=each not in tops)
    holding = [each for each in own if each.params]
    if len(holding) == 1 and holding[0].settings.mesh.size > 1:
        remark_on_single_group(module, holding[0].unit.sizes().unsharded)
    return root
