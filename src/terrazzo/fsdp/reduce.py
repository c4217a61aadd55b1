"""From gradients of whole parameters to gradients of sharded ones.

One flat buffer per bucket takes the gradients of all its trainable parameters, whichever of them got one in this
backward, so that ranks agree on the sizes.  Frozen parameters need no room.  The arithmetic is the reference's:
gradients are accumulated and reduced in the reduce dtype, and handed over in the parameters' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from terrazzo._torch.autograd import accumulation_hooks, gradient_hooks
from terrazzo.comm.collectives import all_reduce
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.bucket import Bucket
from terrazzo.fsdp.direct import start_reduce
from terrazzo.fsdp.flat import FlatPlan
from terrazzo.fsdp.parameter import ShardedParameter

AllReduceHook = Callable[[Tensor], None]


class ReduceOptions:
    """What users set about the reduction of a group."""

    __slots__ = ("all_reduce", "divisor", "hook", "hook_stream")

    def __init__(self) -> None:
        self.all_reduce = True  # over the replicas of HSDP
        self.divisor: float | None = None  # None: the number of ranks
        self.hook: AllReduceHook | None = None
        self.hook_stream: Any = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction under way."""

    pending: Pending[Tensor]
    hand_over: Callable[[Tensor], None]

    def finish(self) -> None:
        """Wait for it, and give the sharded parameters their gradients."""
        self.hand_over(self.pending.wait())

    def discard(self) -> None:
        """Wait for it: other ranks wait for this one's messages, and the next ones must not be mistaken for them."""
        self.pending.wait()


class Reducer:
    """Reduces the gradients of one bucket."""

    def __init__(self, bucket: Bucket, options: ReduceOptions) -> None:
        self.bucket = bucket
        self.options = options
        self._trainable: tuple[ShardedParameter, ...] = ()
        self._plan: FlatPlan | None = None
        self._accumulated: dict[int, Tensor] = {}  # by position: sums in the reduce dtype, not reduced yet
        self._partial: Tensor | None = None  # reduced over the shard axis, not yet over the replicas
        self._copied: Any = None  # the event after which gradients are on the CPU

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients are reduced."""
        precision = self.bucket.settings.precision
        return precision.reduce_dtype or self.bucket.compute_dtype

    @property
    def reduce_bytes(self) -> int:
        """What a rank sends, on average, for one reduce-scatter."""
        plan = self._current_plan()
        return 0 if plan is None else (plan.n - 1) * plan.total * self.dtype.itemsize // plan.n

    @property
    def all_reduce_bytes(self) -> int:
        """What a rank sends, on average, to reduce over the replicas."""
        plan, replicate = self._current_plan(), self.bucket.settings.mesh.replicate
        if plan is None or replicate is None:
            return 0
        return 2 * (replicate.size - 1) * plan.own_size * self.dtype.itemsize // replicate.size

    def gradient_bytes(self) -> int:
        """Memory of the gradients as backward computes them."""
        return sum(prod(p.shape) for p in self.bucket.params if p.requires_grad) * self.bucket.compute_dtype.itemsize

    def buffer_bytes(self) -> int:
        """Memory of the flat buffer."""
        plan = self._current_plan()
        alone = plan is None or (plan.n == 1 and self.bucket.settings.mesh.replicate is None)
        return 0 if alone or plan is None else plan.total * self.dtype.itemsize

    def _current_plan(self) -> FlatPlan | None:
        trainable = tuple([p for p in self.bucket.params if p.requires_grad])
        if trainable != self._trainable:
            self._trainable = trainable
            axis = self.bucket.settings.mesh.shard
            self._plan = self.bucket.plan_over(axis, trainable) if trainable else None
            self._accumulated.clear()
        return self._plan

    # ------------------------------------------------------------------ without communication

    def accumulate(self) -> None:
        """Keep what backward computed for a later reduction, in the reduce dtype."""
        self._current_plan()
        for i, param in enumerate(self._trainable):
            grad = param.whole_local.grad
            if grad is not None and (grad.dtype is not self.dtype or i in self._accumulated):
                param.whole_local.grad = None
                self._add(i, grad)

    def _add(self, i: int, grad: Tensor) -> None:
        known = self._accumulated.get(i)
        if known is None:
            self._accumulated[i] = grad.to(self.dtype)
        else:
            known.add_(grad)

    def _take(self) -> list[Tensor | None]:
        """The gradients of the trainable parameters, with what was accumulated; afterwards they have none."""
        grads: list[Tensor | None] = []
        for i, param in enumerate(self._trainable):
            local = param.whole_local
            grad = local.grad
            if grad is not None:
                local.grad = None
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
            if self._accumulated and i in self._accumulated:
                known = self._accumulated.pop(i)
                grad = known if grad is None else known.add_(grad)
            grads.append(grad)
        return grads

    # ------------------------------------------------------------------ with communication

    def start(self) -> Reduction | None:
        """Begin the reduction of what gradients there are. None: there is nothing to wait for."""
        plan = self._current_plan()
        if plan is None:
            return None
        grads = self._take()
        missing = [i for i, grad in enumerate(grads) if grad is None]
        if len(missing) == len(grads):
            return None
        mesh, options = self.bucket.settings.mesh, self.options
        if plan.n == 1 and mesh.replicate is None and options.hook is None:
            self._hand_over_alone(grads)
            return None
        wholes = [
            torch.zeros(param.shape, dtype=self.dtype, device=mesh.device) if grad is None else grad
            for param, grad in zip(self._trainable, grads, strict=True)
        ]
        buffers = torch.empty(plan.total, dtype=self.dtype, device=mesh.device)
        plan.pack(wholes, buffers)
        del wholes, grads
        # Half precision has little range: sums of many gradients are divided before they can overflow.
        early = self.dtype is torch.float16 and mesh.device.type != "cpu"
        divisor = options.divisor if options.divisor is not None else mesh.size if early else None
        if early and divisor is not None:
            buffers.div_(divisor)
            divisor = None
        op = "avg" if options.divisor is None and not early else "sum"
        pending = start_reduce(buffers, mesh.shard, plan.sizes, op, self.bucket.tag + 1)
        return Reduction(pending, lambda reduced: self._finish(reduced, plan, op, divisor, missing))

    def _finish(self, reduced: Tensor, plan: FlatPlan, op: str, divisor: float | None, missing: list[int]) -> None:
        mesh, options = self.bucket.settings.mesh, self.options
        if mesh.replicate is not None:
            if self._partial is not None:
                reduced = reduced + self._partial
                self._partial = None
            if not options.all_reduce:
                self._partial = reduced
                return
            reduced = all_reduce(reduced, mesh.replicate, op)
        if divisor is not None:
            reduced = reduced / divisor
        if options.hook is not None:
            self._call_hook(options.hook, reduced)
        self._hand_over(plan.own_views(self._at_rest(reduced)), missing)

    def _call_hook(self, hook: AllReduceHook, reduced: Tensor) -> None:
        stream = self.options.hook_stream
        if stream is None or self.bucket.settings.mesh.replicate is not None:
            hook(reduced)
            return
        device = torch.get_device_module(reduced.device.type)
        current = device.current_stream()
        stream.wait_stream(current)
        with device.stream(stream):
            hook(reduced)
        current.wait_stream(stream)

    def _at_rest(self, reduced: Tensor) -> Tensor:
        """In the dtype and on the device of the sharded parameters."""
        settings, dtype = self.bucket.settings, self.bucket.dtype
        if settings.rest_device == reduced.device:
            return reduced.to(dtype)
        resting = settings.empty_shard(reduced.numel(), dtype)
        resting.copy_(reduced.to(dtype), non_blocking=settings.pinned)
        if settings.pinned:
            self._copied = torch.get_device_module(reduced.device.type).Event()
            self._copied.record()
        return resting

    def _hand_over(self, views: list[Tensor], missing: list[int]) -> None:
        found: list[Tensor | None] = list(views)
        for i in missing:
            if not views[i].any():
                found[i] = None  # no rank had a gradient, so there is none
        self._accumulate_in_shards(found)

    def _accumulate_in_shards(self, grads: list[Tensor | None]) -> None:
        """Add gradients to those of the sharded parameters, and call the hooks that users have put there."""
        known, new, hooked = [], [], []
        for param, grad in zip(self._trainable, grads, strict=True):
            if grad is None:
                continue
            local = param.sharded._local
            if gradient_hooks(local):
                self.settle()
                grad = _after_hooks(local, grad)
            if local.grad is None:
                local.grad = grad
            else:
                known.append(local.grad)
                new.append(grad)
            if accumulation_hooks(local):
                hooked.append(local)
        if known or hooked:
            self.settle()
        if known:
            torch._foreach_add_(known, new)
        for local in hooked:
            for hook in list((accumulation_hooks(local) or {}).values()):
                hook(local)

    def _hand_over_alone(self, grads: list[Tensor | None]) -> None:
        """Nobody to reduce with: gradients become those of the sharded parameters as they are."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        found = [grad for grad in grads if grad is not None]
        if self.options.divisor is not None:
            torch._foreach_div_(found, self.options.divisor)
        settings, dtype = self.bucket.settings, self.bucket.dtype
        for i, grad in zip(present, found, strict=True):
            if grad.dtype is not dtype or grad.device != settings.rest_device:
                grad = grad.to(settings.rest_device, dtype)
            grads[i] = grad.view(self._trainable[i].sharded._local.shape)
        self._accumulate_in_shards(grads)

    def abandon(self) -> None:
        """Forget the gradients of a backward that failed."""
        self._accumulated.clear()
        for param in self.bucket.params:
            param.whole_local.grad = None

    def settle(self) -> None:
        """Wait until gradients that are copied to the CPU are there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _after_hooks(local: Tensor, grad: Tensor) -> Tensor:
    """What the hooks of a sharded parameter make of its gradient, as autograd would have them."""
    for hook in list((gradient_hooks(local) or {}).values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    return grad
