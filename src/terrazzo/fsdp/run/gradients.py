"""From gradients of unsharded parameters to gradients of sharded ones, for each bucket.

One flat buffer has room for the gradients of all trainable parameters of a bucket, whether or not they got one in this
backward, so that its size is the same on all ranks. The arithmetic is PyTorch's: gradients are accumulated and reduced
in the reduce dtype, and converted to the parameters' dtype at the end.

If a parameter has no gradient on some ranks, zeros are used there. If it has none on any rank, its sharded parameter
gets none, as in a single process, so that the optimizer skips it. So ranks must agree on which parameters have
gradients. Every section ends with one element per parameter, which is one if this rank has a gradient and else zero;
its sum over the ranks says whether any rank has one. A rank that has all gradients need not read the sums.

A parameter that is frozen while gradients are accumulated keeps those that it has, as in a single process. So room is
left for it until these are reduced, on all ranks, whether or not they have such gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from terrazzo._torch.autograd import accumulation_hooks, gradient_hooks, have_hooks
from terrazzo.comm.axis import Axis
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.in_place import InPlace
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.misuse import remark_on_graph
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm, empty_to_reduce, ways_to_reduce
from terrazzo.fsdp.run.division import Division, Ways, division_of
from terrazzo.fsdp.settings import AllReduceHook, Options

_ALIGNMENT = 128  # bytes; what backends of accelerators reduce fastest


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """The parameters with room in a flat buffer, and its plan."""

    params: tuple[ShardedParameter, ...]
    plan: FlatPlan
    in_place: InPlace | None  # for reductions directly from the gradients, if possible

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


class Gradients:
    """The gradients of one bucket, from backward to the sharded parameters."""

    def __init__(self, bucket: Bucket, options: Options) -> None:
        self.bucket = bucket
        self.options = options
        self._next: _Flat | None = None  # of the next reduction, if nothing changes before
        self._flat: _Flat | None = None  # of the reduction that runs
        self._accumulated: dict[ShardedParameter, Tensor] = {}  # sums in the reduce dtype that are not reduced yet
        self.waiting = False  # whether ranks may have gradients of earlier backwards that are not reduced yet
        self._frozen: set[ShardedParameter] = set()  # of the frozen parameters those that may have such gradients
        self._packed: Tensor | None = None
        self._unpacked: tuple[list[Tensor], Tensor | None] | None = None  # gradients that are reduced in place
        self._pending: Pending[Tensor] | None = None
        self._reduced: Tensor | None = None
        # Reduced over the shard axis, not yet over the replicas; and how it was divided.
        self._partial: tuple[_Flat, Tensor, Division] | None = None
        self._held: list[Tensor] = []  # inputs of a running all-reduce
        self._missing: list[int] = []  # indices of parameters without a gradient on this rank
        self._division = Division()
        # The section's last elements, and the event after which they are on the host.
        self._reached: tuple[Tensor, Any] | None = None
        self._copied: Any = None  # the event after which gradients are on the CPU

    # ------------------------------------------------------------------ sizes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.bucket.settings.precision.reduce_dtype or self.bucket.compute_dtype

    @property
    def alone(self) -> bool:
        """Whether no other rank reduces with this one, and there is no all-reduce hook."""
        mesh = self.bucket.settings.mesh
        return mesh.shard.size == 1 and mesh.replicate is None and self.options.hook is None

    @property
    def reduce_bytes(self) -> int:
        """The bytes that a rank sends for one reduce-scatter, on average."""
        plan = self.plan()
        return 0 if plan is None else plan.moved(self.dtype.itemsize)

    @property
    def all_reduce_bytes(self) -> int:
        """The bytes that a rank sends to reduce over the replicas, on average."""
        plan, replicate = self.plan(), self.bucket.settings.mesh.replicate
        if plan is None or replicate is None:
            return 0
        return 2 * (replicate.size - 1) * plan.own_size * self.dtype.itemsize // replicate.size

    @property
    def bytes(self) -> int:
        """The bytes of the unsharded gradients."""
        flat = self._flat_now()
        return 0 if flat is None else sum(prod(p.shape) for p in flat.params) * self.bucket.compute_dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """The bytes of the flat buffer."""
        plan = self.plan()
        return 0 if plan is None or self.alone else plan.total * self.dtype.itemsize

    @property
    def reduced_bytes(self) -> int:
        """The bytes of the reduction's result."""
        plan = self.plan()
        return 0 if plan is None or self.alone else plan.own_size * self.dtype.itemsize

    @property
    def accumulated_bytes(self) -> int:
        """The bytes of gradients that wait for a reduction; 0 if they stay what backward has made."""
        return (
            0
            if self.dtype is self.bucket.compute_dtype
            else self.bytes // self.bucket.compute_dtype.itemsize * self.dtype.itemsize
        )

    @property
    def result_bytes(self) -> int:
        """The bytes that dividing and converting the reduction's result takes."""
        plan = self.plan()
        if plan is None or self.alone:
            return 0
        like = torch.empty(0, dtype=self.dtype, device=self.bucket.settings.mesh.device)
        divided = self.dtype.itemsize * (self._division_of(like, plan).after is not None)
        converted = self.bucket.dtype.itemsize * (self.bucket.dtype is not self.dtype)
        return (plan.own_size - plan.extra) * (divided + converted)

    def plan(self) -> FlatPlan | None:
        """The flat plan of the next reduction; None if all parameters are frozen, and none has gradients to reduce."""
        flat = self._flat_now()
        return None if flat is None else flat.plan

    def _flat_now(self) -> _Flat | None:
        partial = () if self._partial is None else self._partial[0].params
        params = tuple([p for p in self.bucket.params if p.requires_grad or p in self._frozen or p in partial])
        if not params:
            return None
        if self._next is None or self._next.params != params:
            mesh = self.bucket.settings.mesh
            extra = len(params) if mesh.size > 1 else 0
            plan = self.bucket.plan_over(mesh.shard, params, extra)
            rest = plan.own_size * self.dtype.itemsize % _ALIGNMENT
            if extra and rest and plan.alike and mesh.device.type != "cpu":
                extra += (_ALIGNMENT - rest) // self.dtype.itemsize
                plan = self.bucket.plan_over(mesh.shard, params, extra)
            suits = InPlace.suits(plan, mesh.shard, self.dtype.itemsize)
            self._next = _Flat(params, plan, InPlace(plan, self.dtype.itemsize) if suits else None)
        return self._next

    def replan(self) -> None:
        """Make the plan again, because the bucket's sections have changed."""
        self._next = None

    def note_frozen(self, param: ShardedParameter, in_backward: bool) -> None:
        """Leave room for a parameter that was frozen now, until the gradients that it may have are reduced.

        Other replicas may have some of micro-batches that this one did not run, so over replicas there always is room,
        as long as any rank has gradients.
        """
        if self.waiting or in_backward or self._over_replicas:
            self._frozen.add(param)

    @property
    def _over_replicas(self) -> bool:
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

    @property
    def has_partial(self) -> bool:
        """Whether there are gradients that are reduced over the shards, and not yet over the replicas."""
        return self._partial is not None

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

    def _take(self) -> list[Tensor | None]:
        """Begin a reduction: take the gradients of its parameters, with those that were accumulated."""
        self._flat = self._flat_now()
        self._frozen.clear()
        self.waiting = False
        grads: list[Tensor | None] = []
        for param in () if self._flat is None else self._flat.params:
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
        return grads

    def take_over(self, former: Sequence[Gradients]) -> None:
        """Take what others, which had these parameters before, have not reduced yet."""
        for param in self.bucket.params:
            for each in former:
                if param in each._accumulated:
                    self._accumulated[param] = each._accumulated[param]
                if param in each._frozen:
                    self._frozen.add(param)
                self.waiting = self.waiting or (each.waiting and param in each.bucket.params)

    # ------------------------------------------------------------------ with communication

    def pack(self) -> None:
        """Copy the gradients into the buffer of the reduction, unless they are reduced in place."""
        if self.plan() is None:
            return
        wholes, reached = self._collect()
        assert self._flat is not None
        plan = self._flat.plan
        if self._flat.in_place is not None and self.options.usual:
            self._unpacked = [whole.to(self.dtype) for whole in wholes], reached
            return
        mesh = self.bucket.settings.mesh
        self._packed = empty_to_reduce(self.options, plan.total, self.dtype, mesh.device, self.reduce_axis)
        plan.pack(wholes, self._packed, reached)

    def _collect(self) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of all parameters that have room, zeros for missing ones, and the elements that say which
        exist."""
        grads = self._take()
        flat = self._flat
        assert flat is not None
        if any(grad is not None and grad.requires_grad for grad in grads):
            remark_on_graph()
        device = self.bucket.settings.mesh.device
        self._missing = [i for i, grad in enumerate(grads) if grad is None]
        wholes = [
            torch.zeros(param.shape, dtype=self.dtype, device=device) if grad is None else grad
            for param, grad in zip(flat.params, grads, strict=True)
        ]
        reached = None
        if flat.plan.extra:
            reached = torch.ones(flat.plan.extra, dtype=self.dtype, device=device)
            if self._missing:
                reached[self._missing] = 0
        return wholes, reached

    def reduce(self, comm: Comm) -> None:
        """Start the reduce-scatter."""
        flat, packed = self._flat, self._packed
        if flat is None:
            return
        if self._unpacked is not None and flat.in_place is not None:
            (wholes, reached), self._unpacked = self._unpacked, None
            division = self._decide(wholes[0], flat.plan)
            if division.before is not None:
                wholes = list(torch._foreach_div(wholes, division.before))
            op = division.shards
            assert isinstance(op, str)
            self._pending = flat.in_place.reduce(wholes, reached, self.reduce_axis, op, self.bucket.tag + 1)
            return
        if packed is None:
            return
        division = self._decide(packed, flat.plan)
        if division.before is not None:
            packed.div_(division.before)
        self._pending = comm.reduce(packed, flat.plan, self.reduce_axis, division.shards, self.bucket.tag + 1)

    @property
    def reduce_axis(self) -> Axis:
        """The axis of the reduction, with a process group of its own if the user has set that."""
        axis = self.bucket.settings.mesh.shard
        return self.options.reduce_axes.get(axis, axis)

    def _decide(self, like: Tensor, plan: FlatPlan) -> Division:
        """Decide how tensors like this with this plan are divided and reduced."""
        self._division = self._division_of(like, plan)
        return self._division

    def _division_of(self, like: Tensor, plan: FlatPlan) -> Division:
        mesh, options, axis = self.bucket.settings.mesh, self.options, self.reduce_axis
        ways = ways_to_reduce(options, axis, like)
        if ways is Ways.NATIVE and plan.ragged:  # a ragged plan is not reduced by the backend's reduce-scatter
            ways = Ways.SUMS
        replicas = 1 if mesh.replicate is None else mesh.replicate.size
        return division_of(self.dtype, ways, mesh.shard.size, replicas, options.divisor, mesh.sums_already)

    def _take_partial(self) -> tuple[_Flat, Tensor] | None:
        """The earlier gradients, divided so far as those of the reduction that runs."""
        if self._partial is None:
            return None
        (flat, section, division), self._partial = self._partial, None
        shards = self.bucket.settings.mesh.shard.size
        before, now = division.divisor_so_far(shards), self._division.divisor_so_far(shards)
        return flat, section if before == now else section.mul_(before / now)

    def wait(self) -> None:
        """Wait for the last collective."""
        if self._pending is not None:
            self._reduced = self._pending.wait()
            self._pending = None

    def all_reduce(self, comm: Comm) -> None:
        """Start to reduce over the replicas."""
        self.wait()
        replicate = self.bucket.settings.mesh.replicate
        if self._reduced is None:
            return
        self._held = [self._reduced]  # its memory belongs to another stream, so keep it until this one is done
        partial = self._take_partial()
        if partial is not None:
            assert self._flat is not None
            self._held.append(partial[1])
            self._flat.add(self._reduced, *partial)  # in place: this stream must take no memory
        if replicate is not None:
            self._pending = comm.all_reduce(self._reduced, replicate, self._division.replicas)

    def store(self) -> None:
        """Keep the gradients that are reduced over the shards, for a later reduction over the replicas."""
        self.wait()
        if self._reduced is not None:
            assert self._flat is not None
            partial = self._take_partial()
            if partial is not None:
                self._flat.add(self._reduced, *partial)
                if partial[1].device.type != "cpu":  # its memory belongs to another stream, and is freed now
                    device = torch.get_device_module(partial[1].device.type)
                    partial[1].record_stream(device.current_stream())
            self._partial = self._flat, self._reduced, self._division
            self._reduced = self._flat = None

    def release(self) -> None:
        """Free the packed buffer."""
        self._packed = None

    def finish(self) -> None:
        """Divide and convert the reduced gradients, and call the user's hook."""
        self.wait()
        flat, reduced, options = self._flat, self._reduced, self.options
        if flat is None or reduced is None:
            return
        plan = flat.plan
        counts = None
        if plan.extra:
            reduced, counts = reduced[: -plan.extra], reduced[-plan.extra :]
        if self._division.after is not None:
            reduced = reduced / self._division.after
        if counts is not None and self._missing:
            self._note_reached(counts)
        if options.hook is not None:
            self._call_hook(options.hook, reduced)
        self._reduced = self._at_rest(reduced)

    def _note_reached(self, reached: Tensor) -> None:
        """Start to copy the elements to the host, which reads them at the end of backward."""
        if reached.device.type == "cpu":
            self._reached = reached, None
            return
        there = torch.empty(reached.shape, dtype=reached.dtype, pin_memory=True, device="cpu")
        there.copy_(reached, non_blocking=True)
        event = torch.get_device_module(reached.device.type).Event()
        event.record()
        self._reached = there, event

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
        """The gradients in the dtype and on the device of the sharded parameters."""
        settings, dtype = self.bucket.settings, self.bucket.dtype
        if settings.rest_device == reduced.device:
            return reduced.to(dtype)
        resting = settings.empty_shard(reduced.numel(), dtype)
        resting.copy_(reduced.to(dtype), non_blocking=settings.pinned)
        if settings.pinned:
            self._copied = torch.get_device_module(reduced.device.type).Event()
            self._copied.record()
        return resting

    def hand_over(self) -> bool:
        """Set `.grad` of the sharded parameters; returns whether the next plan has other parameters than this one."""
        self.release()
        self._held = []
        reduced, self._reduced = self._reduced, None
        if reduced is not None and self._flat is not None:  # also if this bucket is alone, but others of its group not
            found: list[Tensor | None] = list(self._flat.plan.own_views(reduced))
            for i in self._unreached(found):
                found[i] = None
            if self._over_replicas:  # the next time, too, other replicas may train what this one has frozen
                both = zip(self._flat.params, found, strict=True)
                self._frozen.update(param for param, grad in both if grad is not None and not param.requires_grad)
            self._accumulate_in_shards(found)
        elif self.alone:
            self._hand_over_alone()
        flat, self._flat = self._flat, None
        return flat is not None and flat is not self._flat_now()

    def _unreached(self, found: list[Tensor | None]) -> list[int]:
        """The indices of parameters for which no rank has a gradient."""
        if self._reached is None:
            return [] if self._flat is None or self._flat.plan.extra else self._missing
        (reached, event), self._reached = self._reached, None
        if event is not None:
            event.synchronize()
        counts = reached.tolist()
        unreached = [i for i in self._missing if not counts[i] > 0]
        if self.options.hook is not None:  # the hook may have reduced over more ranks
            unreached = [i for i in unreached if not found[i].any()]  # type: ignore[union-attr]
        return unreached

    def _hand_over_alone(self) -> None:
        """Use the gradients for the sharded parameters directly, because no other rank reduces with this one."""
        grads = self._take()
        if self.options.divisor is not None and any(grad is not None for grad in grads):
            torch._foreach_div_([grad for grad in grads if grad is not None], self.options.divisor)
        bucket = self.bucket
        if not bucket.aliased or self.dtype is not bucket.dtype:
            device, dtype = bucket.settings.rest_device, bucket.dtype
            grads = [None if grad is None else grad.to(device, dtype) for grad in grads]
        self._accumulate_in_shards(grads)

    def _accumulate_in_shards(self, grads: list[Tensor | None]) -> None:
        """Add gradients to those of the sharded parameters, and call users' hooks on these."""
        known, new, hooked = [], [], []
        params = () if self._flat is None else self._flat.params
        watched = have_hooks(param.sharded._local for param in params)
        for param, grad in zip(params, grads, strict=True):
            local = param.sharded._local
            if grad is None:
                continue
            if watched and gradient_hooks(local):
                self.settle()
                grad = _after_hooks(local, grad)
            if local.grad is None:
                local.grad = grad
            else:
                known.append(local.grad)
                new.append(grad)
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
        pending, self._pending = self._pending, None
        self._packed = self._unpacked = self._reduced = self._reached = self._flat = None
        self._held = []
        if pending is not None:
            pending.wait()

    def abandon(self, params: set[ShardedParameter]) -> None:
        """Drop the gradients of these parameters that are not reduced yet."""
        for param in params.intersection(self.bucket.params):
            self._accumulated.pop(param, None)
            param.unsharded_local.grad = None
        if params.issuperset(self.bucket.params):
            self._frozen.clear()
            self.waiting = False
            self._partial = None
        elif self._partial is not None:
            flat, section, _ = self._partial
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
