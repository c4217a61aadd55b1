"""From gradients of unsharded parameters to gradients of sharded ones, for each bucket.

One flat buffer has room for the gradients of all trainable parameters of a bucket, whether or not they got one in this
backward, so that its size is the same on all ranks. The arithmetic is PyTorch's: gradients are accumulated and reduced
in the reduce dtype, and converted to the parameters' dtype at the end.

If a parameter has no gradient on some ranks, zeros are used there. If it has none on any rank, its sharded parameter
gets none, as in a single process, so that the optimizer skips it. So ranks must agree on which parameters have
gradients. Every section ends with one element per parameter, which is one if this rank has a gradient and else zero;
its sum over the ranks says whether any rank has one. A rank that has all gradients need not read the sums. On an
accelerator another one reads them when `.grad` of a parameter is asked for that has no gradient on this rank.

A parameter that is frozen while gradients are accumulated keeps those that it has, as in a single process. So room is
left for it until these are reduced, on all ranks, whether or not they have such gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo._torch.autograd import accumulation_hooks, gradient_hooks, have_hooks
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import all_reduce_start
from terrazzo.comm.encoded import Encoded
from terrazzo.comm.flat import ALIGNMENT, FlatPlan
from terrazzo.comm.in_place import InPlace
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.misuse import remark_on_graph
from terrazzo.fsdp.offload import Reached, park_gradient, parked_gradient, to_host
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.plan.units import Sizes
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm, empty_for, ways_to_reduce
from terrazzo.fsdp.run.division import Division, Ways, division_of
from terrazzo.fsdp.run.encoded import encoded, over_replicas
from terrazzo.fsdp.run.presence import Sums, elements
from terrazzo.fsdp.settings import AllReduceHook, Options

_MOST_FLATS = 16  # combinations of parameters with room whose plans are kept


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """The parameters with room in a flat buffer, its plan, and how it is reduced."""

    params: tuple[ShardedParameter, ...]
    plan: FlatPlan
    in_place: InPlace | None  # for reductions directly from the gradients, if possible
    encoded: Encoded | None  # for reductions with a codec
    to_replicas: Encoded | None  # for all-reduces with it
    division: Division

    def add(self, section: Tensor, other: _Flat, others: Tensor) -> None:
        """Add a section with another plan, of which all parameters have room here too, to one with this plan."""
        if other is self:
            section.add_(others)
            return
        found = dict(zip(self.params, self.plan.own_views(section), strict=True))
        for param, chunk in zip(other.params, other.plan.own_views(others), strict=True):
            found[param].add_(chunk)
        if self.plan.extra:
            own, counts = [self.params.index(param) for param in other.params], section[-self.plan.extra :]
            counts[own] += others[-other.plan.extra :][: len(own)]


class _Running(NamedTuple):
    """A reduction that runs: what it has at its present stage."""

    flat: _Flat
    missing: list[int]  # indices of parameters without a gradient on this rank
    packed: Tensor | None = None  # the buffer with all of them
    unpacked: tuple[list[Tensor], Tensor | None] | None = None  # gradients that are reduced in place
    pending: Pending[Tensor] | None = None  # the collective that runs
    reduced: Tensor | None = None
    sums: Sums | None = None  # over the ranks, of the last elements


class Gradients:
    """The gradients of one bucket, from backward to the sharded parameters."""

    def __init__(self, bucket: Bucket, group: Group) -> None:
        self.bucket = bucket
        self._group = group  # or one of several with equal options
        # Of reductions, by the options and the parameters with room.
        self._flats: dict[tuple[Options, tuple[ShardedParameter, ...]], _Flat] = {}
        self._running: _Running | None = None
        self._accumulated: dict[ShardedParameter, Tensor] = {}  # sums in the reduce dtype that are not reduced yet
        self.waiting = False  # whether ranks may have gradients of earlier backwards that are not reduced yet
        self._frozen: set[ShardedParameter] = set()  # of the frozen parameters those that may have such gradients
        self.partial: tuple[_Flat, Tensor] | None = None  # reduced over the shard axis, not yet over the replicas
        # What streams beside read: freed when the compute stream has waited for them.
        self._held: list[Tensor] = []
        self._copied: Any = None  # the event after which gradients are on the CPU
        if bucket.settings.reduce_codec is not None:
            self._flat_now()  # so that what cannot be encoded raises at once

    # ------------------------------------------------------------------ sizes

    @property
    def options(self) -> Options:
        return self._group.options

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.bucket.settings.precision.reduce_dtype or self.bucket.compute_dtype

    @property
    def alone(self) -> bool:
        """Whether no other rank reduces with this one, and there is no all-reduce hook."""
        mesh = self.bucket.settings.mesh
        return mesh.shard.size == 1 and mesh.replicate is None and self.options.hook is None

    def sizes(self) -> Sizes:
        """The bytes of the gradients, and of their reduction."""
        flat, bucket, mesh = self._flat_now(), self.bucket, self.bucket.settings.mesh
        if flat is None:
            return Sizes()
        elements, itemsize = sum(prod(p.shape) for p in flat.params), self.dtype.itemsize
        converted = bucket.dtype is not self.dtype
        made = Sizes(
            gradients=elements * bucket.compute_dtype.itemsize,
            accumulated=0 if self.dtype is bucket.compute_dtype else elements * itemsize,
        )
        if self.alone:
            converted = converted or bucket.dtype is not bucket.compute_dtype  # what was accumulated may need less
            return made._replace(result=elements * bucket.dtype.itemsize * converted)
        plan, sent, replicate, exchanged = flat.plan, flat.encoded, mesh.replicate, flat.to_replicas
        section = plan.own_size * itemsize
        all_reduce_moves = 0 if replicate is None else 2 * (replicate.size - 1) * section // replicate.size
        if exchanged is not None:
            all_reduce_moves = 2 * exchanged.plan.moved(1)
        divided = flat.division.after is not None
        return made._replace(
            packed=plan.total * itemsize if sent is None else sent.plan.total,
            reduced=section if sent is None else section + sent.plan.total,
            result=(plan.own_size - plan.extra) * (itemsize * divided + bucket.dtype.itemsize * converted),
            reduce_moves=plan.moved(itemsize) if sent is None else sent.plan.moved(1),
            exchanged=0 if exchanged is None else exchanged.held(itemsize),
            all_reduce_moves=all_reduce_moves,
        )

    def plan(self) -> FlatPlan | None:
        """The flat plan of the next reduction; None if all parameters are frozen, and none has gradients to reduce."""
        flat = self._flat_now()
        return None if flat is None else flat.plan

    def _flat_now(self) -> _Flat | None:
        partial = () if self.partial is None else self.partial[0].params
        params = tuple([p for p in self.bucket.params if p.requires_grad or p in self._frozen or p in partial])
        if not params:
            return None
        options = self.options
        found = self._flats.get((options, params))
        if found is None:
            if len(self._flats) >= _MOST_FLATS:
                self._flats.clear()
            mesh = self.bucket.settings.mesh
            extra = len(params) if mesh.size > 1 else 0
            plan = self.bucket.plan_over(mesh.shard, params, extra)
            rest = plan.own_size * self.dtype.itemsize % ALIGNMENT
            if extra and rest and plan.alike and mesh.device.type != "cpu":
                extra += (ALIGNMENT - rest) // self.dtype.itemsize
                plan = self.bucket.plan_over(mesh.shard, params, extra)
            codec, settings = self.bucket.settings.reduce_codec, self.bucket.settings
            sent = in_place = None
            if codec is not None and mesh.shard.size > 1:
                sent = encoded(params, plan, codec, self.bucket.compute_dtype, self.dtype, settings, True)
            elif options.usual and InPlace.suits(plan, mesh.shard, self.dtype.itemsize):
                in_place = InPlace(plan, self.dtype.itemsize)
            to_replicas = None
            matrices = any(len(param.shape) > 1 for param in params)
            if codec is not None and matrices and mesh.replicate is not None and mesh.replicate.size > 1:
                to_replicas = over_replicas(params, plan, codec, self.dtype, mesh.replicate, settings)
            found = _Flat(params, plan, in_place, sent, to_replicas, self._division_of(plan))
            self._flats[options, params] = found
        return found

    def note_frozen(self, param: ShardedParameter, in_backward: bool) -> None:
        """Leave room for a parameter that was frozen now, until the gradients that it may have are reduced.

        Other replicas may have some of micro-batches that this one did not run, so over replicas there always is room,
        as long as any rank has gradients.
        """
        if param in self.bucket.params and (self.waiting or in_backward or self.over_replicas):
            self._frozen.add(param)

    @property
    def over_replicas(self) -> bool:
        """Whether they are reduced over replicas, too."""
        replicate = self.bucket.settings.mesh.replicate
        return replicate is not None and replicate.size > 1

    # ------------------------------------------------------------------ without communication

    def any(self) -> bool:
        """Whether there are gradients from backward, or ranks may have some of earlier ones that are not reduced."""
        return self.waiting or any(p.unsharded_local.grad is not None for p in self.bucket.params)

    def have_nan(self) -> bool:
        """Whether there is a NaN in the gradients from backward."""
        found = [p.unsharded_local.grad for p in self.bucket.params]
        return any(bool(grad.isnan().any()) for grad in found if grad is not None)

    def accumulate(self) -> None:
        """Keep the gradients for a later reduction, in the reduce dtype."""
        for param in self.bucket.params:
            grad = param.unsharded_local.grad
            if grad is not None and (grad.dtype is not self.dtype or param in self._accumulated):
                param.unsharded_local.grad = None
                known = self._accumulated.get(param)
                if known is None:
                    dense = grad if grad.layout is torch.strided else grad.to_dense()
                    self._accumulated[param] = dense.to(self.dtype)
                else:
                    known.add_(grad)

    def _take(self) -> tuple[_Flat | None, list[Tensor | None]]:
        """Begin a reduction: take the gradients of its parameters, with those that were accumulated."""
        flat = self._flat_now()
        self._frozen.clear()
        self.waiting = False
        grads: list[Tensor | None] = []
        for param in () if flat is None else flat.params:
            local = param.unsharded_local
            grad = local.grad
            if grad is not None:
                local.grad = None
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
            if self._accumulated and param in self._accumulated:
                known = self._accumulated.pop(param)
                grad = known if grad is None else known.add_(grad)
            grads.append(grad)
        return flat, grads

    def take_over(self, former: Sequence[Gradients]) -> None:
        """Take what others, which had these parameters before, have not reduced yet."""
        for param in self.bucket.params:
            for each in former:
                if param in each._accumulated:
                    self._accumulated[param] = each._accumulated[param]
                if param in each._frozen:
                    self._frozen.add(param)
                self.waiting = self.waiting or (each.waiting and param in each.bucket.params)
        for each in former:
            if each.bucket.params == self.bucket.params:  # they have another dtype now
                self._running, self._copied = each._running, each._copied
                self._held.extend(each._held)
            if each.partial is not None and set(self.bucket.params).issuperset(each.partial[0].params):
                self.partial = each.partial

    # ------------------------------------------------------------------ with communication

    def pack(self) -> None:
        """Copy the gradients into the buffer of the reduction, unless they are reduced in place."""
        flat, grads = self._take()
        if flat is None:
            return
        if any(grad is not None and grad.requires_grad for grad in grads):
            remark_on_graph()
        plan, device = flat.plan, self.bucket.settings.mesh.device
        running = _Running(flat, [i for i, grad in enumerate(grads) if grad is None])
        wholes = [
            torch.zeros(param.shape, dtype=self.dtype, device=device) if grad is None else grad
            for param, grad in zip(flat.params, grads, strict=True)
        ]
        reached = None  # the elements that say which gradients exist
        if plan.extra:
            reached = elements(plan.extra, running.missing, self.dtype, device)
        before = flat.division.before
        packed = unpacked = None
        if before is not None and (flat.encoded is not None or flat.in_place is not None):
            wholes = list(torch._foreach_div(wholes, before))
        if flat.encoded is not None:
            packed = flat.encoded.pack(wholes, reached)
        elif flat.in_place is not None:
            unpacked = [whole.to(self.dtype) for whole in wholes], reached
        else:
            packed = empty_for("packed", self.options, plan.total, self.dtype, device, self.reduce_axis)
            plan.pack(wholes, packed, reached)
            if before is not None:
                packed.div_(before)
        self._running = running._replace(packed=packed, unpacked=unpacked)

    def reduce(self, comm: Comm, tag: int) -> None:
        """Start the reduce-scatter."""
        running, axis = self._running, self.reduce_axis
        if running is None:
            return
        flat, packed, op = running.flat, running.packed, running.flat.division.shards
        if running.unpacked is not None and flat.in_place is not None:
            assert isinstance(op, str)
            pending = flat.in_place.reduce(*running.unpacked, axis, op, tag)
        elif flat.encoded is not None:
            assert packed is not None
            pending = flat.encoded.reduce(packed, axis, self.dtype, op)
        else:
            assert packed is not None
            pending = comm.reduce(packed, flat.plan, axis, op, tag)
        self._running = running._replace(unpacked=None, pending=pending)

    @property
    def reduce_axis(self) -> Axis:
        """The axis of the reduction, with a process group of its own if the user has set that."""
        axis = self.bucket.settings.mesh.shard
        return self.options.reduce_axes.get(axis, axis)

    def _division_of(self, plan: FlatPlan) -> Division:
        """How gradients with this plan are divided and reduced."""
        mesh, options = self.bucket.settings.mesh, self.options
        ways = ways_to_reduce(options, self.reduce_axis, torch.empty(0, dtype=self.dtype, device=mesh.device))
        if ways is Ways.NATIVE and plan.ragged:  # a ragged plan is not reduced by the backend's reduce-scatter
            ways = Ways.SUMS
        replicas = 1 if mesh.replicate is None else mesh.replicate.size
        return division_of(self.dtype, ways, mesh.shard.size, replicas, options.divisor, mesh.sums_already)

    def _add_partial(self, running: _Running, reduced: Tensor) -> None:
        """Add the earlier gradients, divided so far as those of the reduction that runs, in place: this stream must
        take no memory, and what it reads is held."""
        if self.partial is None:
            return
        (flat, section), self.partial = self.partial, None
        shards = self.bucket.settings.mesh.shard.size
        before, now = (each.division.divisor_so_far(shards) for each in (flat, running.flat))
        self._held.append(section)
        running.flat.add(reduced, flat, section if before == now else section.mul_(before / now))

    def _ended(self) -> tuple[_Running, Tensor] | None:
        """The reduction that runs, and its result, after its last collective."""
        running = self._running
        if running is not None and running.pending is not None:
            running = self._running = running._replace(reduced=running.pending.wait(), pending=None)
        return None if running is None or running.reduced is None else (running, running.reduced)

    def all_reduce(self) -> None:
        """Start to reduce over the replicas."""
        ended, replicate = self._ended(), self.bucket.settings.mesh.replicate
        if ended is None:
            return
        running, reduced = ended
        self._add_partial(running, reduced)
        if replicate is not None:
            flat, op = running.flat, running.flat.division.replicas
            if flat.to_replicas is None:
                pending = all_reduce_start(reduced, replicate, op, in_place=True)
            else:
                pending = flat.to_replicas.all_reduce(reduced, flat.plan.own_views(reduced), replicate, op)
            self._running = running._replace(pending=pending)

    def store(self) -> None:
        """Keep the gradients that are reduced over the shards, for a later reduction over the replicas."""
        ended = self._ended()
        if ended is not None:
            running, reduced = ended
            self._add_partial(running, reduced)
            self.partial = running.flat, reduced
            self._release_packed()
            self._running = None

    def release(self) -> None:
        """Free the packed buffer; and, after the reduction, what it has read."""
        if self._running is None:
            self._held.clear()
        else:
            self._release_packed()

    def _release_packed(self) -> None:
        running, buffers = self._running, self.options.buffers
        if running is not None and running.packed is not None:
            if buffers is not None:
                buffers.give_back(running.packed)
            self._running = running._replace(packed=None)

    def finish(self) -> None:
        """Divide and convert the reduced gradients, and call the user's hook."""
        ended, options = self._ended(), self.options
        if ended is None:
            return
        running, reduced = ended
        extra = running.flat.plan.extra
        if extra:
            reduced, counts = reduced[:-extra], reduced[-extra:]
            if running.missing:
                running = running._replace(sums=Sums(counts))
        if running.flat.division.after is not None:
            reduced = reduced / running.flat.division.after
        if options.hook is not None:
            self._call_hook(options.hook, reduced)
        self._running = running._replace(reduced=self._at_rest(reduced))

    def _call_hook(self, hook: AllReduceHook, gradients: Tensor) -> None:
        stream = self.options.hook_stream
        if stream is None or self.bucket.settings.mesh.replicate is not None:
            hook(gradients)
            return
        device = torch.get_device_module(gradients.device.type)
        current = device.current_stream()
        stream.wait_stream(current)
        with device.stream(stream):
            hook(gradients)
        current.wait_stream(stream)

    def _at_rest(self, reduced: Tensor) -> Tensor:
        """The gradients in the dtype of the sharded parameters, and on the device where they are kept."""
        settings, dtype = self.bucket.settings, self.bucket.dtype
        if settings.gradients_device == reduced.device:
            return reduced.to(dtype)
        resting = to_host(reduced.to(dtype), settings)
        if settings.pinned:
            self._copied = torch.get_device_module(reduced.device.type).Event()
            self._copied.record()
        return resting

    def hand_over(self) -> bool:
        """Set `.grad` of the sharded parameters; returns whether the next plan has other parameters than this one."""
        self._held.clear()
        self._release_packed()
        running, self._running = self._running, None
        if running is not None and running.reduced is not None:  # also if it is alone, but others of its unit not
            flat = running.flat
            found: list[Tensor | None] = list(flat.plan.own_views(running.reduced))
            undecided = self._undecided(running, found)
            if self.over_replicas:  # the next time, too, other replicas may train what this one has frozen
                both = zip(flat.params, found, strict=True)
                self._frozen.update(param for param, grad in both if grad is not None and not param.requires_grad)
        elif self.alone:
            taken, found = self._take()
            if taken is None:
                return False
            flat, found, undecided = taken, self._alone(found), {}
        else:
            return False
        self._accumulate_in_shards(flat.params, found, undecided)
        return flat is not self._flat_now()

    def _undecided(self, running: _Running, found: list[Tensor | None]) -> dict[int, Reached]:
        """The parameters without a gradient on this rank for which the host would have to wait to know whether any rank
        has one, by index, each with a function that returns that. What no rank has becomes None in `found`."""
        undecided: dict[int, Reached] = {}
        for i in running.missing:
            param = running.flat.params[i]
            reached = self._reached(running.sums, i, found[i])
            local = param.sharded._local
            waits = running.sums is not None and not running.sums.are_here
            # All ranks have to know now whether there will be room for a frozen parameter, and whether to call hooks.
            if waits and param.requires_grad and not have_hooks([local]):
                undecided[i] = reached
            elif not reached():
                found[i] = None
        return undecided

    def _reached(self, sums: Sums | None, i: int, grad: Tensor | None) -> Reached:
        """Whether any rank has a gradient of a parameter that has none on this one."""

        def reached() -> bool:
            if sums is None:
                return False
            if sums.reached(i) or self.options.hook is None:
                return sums.reached(i)
            self.settle()
            return grad is not None and bool(grad.any())  # the hook may have reduced over more ranks

        return reached

    def _alone(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients as those of the sharded parameters, where no other rank reduces with this one."""
        if self.options.divisor is not None and any(grad is not None for grad in grads):
            torch._foreach_div_([grad for grad in grads if grad is not None], self.options.divisor)
        bucket = self.bucket
        device, dtype = bucket.settings.gradients_device, bucket.dtype
        if bucket.aliased and self.dtype is dtype and device == bucket.settings.rest_device:
            return grads
        return [None if grad is None else grad.to(device, dtype) for grad in grads]

    def _accumulate_in_shards(
        self, params: Sequence[ShardedParameter], grads: list[Tensor | None], undecided: Mapping[int, Reached]
    ) -> None:
        """Add gradients to those of the sharded parameters, and call users' hooks on these. Of the `undecided` ones it
        is not known yet whether there are any; their values are zeros if not."""
        known, new, hooked = [], [], []
        watched, settings = have_hooks(param.sharded._local for param in params), self.bucket.settings
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            local = param.sharded._local
            if grad is None:
                continue
            if watched and gradient_hooks(local):
                self.settle()
                grad = self._at_rest(_after_hooks(local, grad.to(local.device)))
            reached = undecided.get(i)
            before = parked_gradient(param.sharded, settings, reached)
            if before is not None:
                known.append(before)
                new.append(grad)
            elif settings.parks_gradients or reached is not None:
                park_gradient(param.sharded, grad, settings, reached)
            else:
                local.grad = grad
            if watched and accumulation_hooks(local):
                hooked.append(local)
        if known or hooked:
            self.settle()
        if known:
            torch._foreach_add_(known, new)
        for local in hooked:
            for hook in list((accumulation_hooks(local) or {}).values()):
                hook(local)

    def discard(self) -> None:
        """Wait for running communication: other ranks wait for it, and later messages must not match it."""
        self._held.clear()
        running = self._running
        try:
            if running is not None and running.pending is not None:
                running.pending.wait()
        finally:
            self._release_packed()
            self._running = None

    def accumulated(self, param: ShardedParameter) -> Tensor | None:
        """The gradient of a parameter that backwards have added up without reducing it."""
        return self._accumulated.get(param, param.unsharded_local.grad)

    def abandon(self, params: set[ShardedParameter]) -> None:
        """Drop the gradients of these parameters that are not reduced yet."""
        for param in params.intersection(self.bucket.params):
            self._accumulated.pop(param, None)
            param.unsharded_local.grad = None
        if params.issuperset(self.bucket.params):
            self._frozen.clear()
            self.waiting = False
            self.partial = None
        elif self.partial is not None:
            flat, section = self.partial
            for i, (param, chunk) in enumerate(zip(flat.params, flat.plan.own_views(section), strict=True)):
                if param in params:
                    chunk.zero_()
                    section[section.numel() - flat.plan.extra + i] = 0

    def settle(self) -> None:
        """Wait until the gradients are copied to the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _after_hooks(local: Tensor, grad: Tensor) -> Tensor:
    """The gradient after the hooks of a sharded parameter, which are called as autograd calls them."""
    for hook in list((gradient_hooks(local) or {}).values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    return grad
