"""What a bucket sends with codecs: matrices as the policy's codec encodes them, vectors as they are. The codec of a
parameter that is a tensor subclass with hooks for the all-gather is its class.

Its class defines PyTorch's hooks:

    fsdp_pre_all_gather(self, mesh) -> (inputs, metadata)
    fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None) -> (tensor, tensors to free); None with out

The sharded parameter is of this class on every rank. Before each gather, the first hook returns plain tensors of the
same size on all ranks, which are gathered as bytes, together with those of the unit's other such parameters. The second
hook makes the unsharded parameter from the results the first time, and later fills it (`out`), so that autograd's saved
tensors stay the same objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch import storages
from terrazzo._torch.counting import writes_to
from terrazzo._torch.dispatching import has_inner_tensors
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.codecs import Codec, Plain
from terrazzo.comm.encoded import Encoded
from terrazzo.comm.flat import ALIGNMENT, FlatPlan, Shape
from terrazzo.comm.pending import Pending
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.parameter import ShardedParameter, are_alike
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm
from terrazzo.fsdp.run.memory import ReturnableMemory
from terrazzo.fsdp.settings import Settings
from terrazzo.tensor.dtensor import local_of

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def bucket_of(params: Sequence[ShardedParameter], settings: Settings, equal: bool) -> Bucket:
    """A bucket that gathers as the parameters' class or the settings say."""
    if is_extended(params[0].values):
        return ExtendedBucket(params, settings)
    encodes = settings.gather_codec is not None and settings.mesh.shard.size > 1
    return (EncodedBucket if encodes else Bucket)(params, settings, equal)


def encoded(
    params: Sequence[ShardedParameter],
    plan: FlatPlan,
    codec: Codec,
    dtype: torch.dtype,
    sent: torch.dtype,
    settings: Settings,
    equal: bool,
) -> Encoded:
    """The sections of parameters, or of their gradients, of `dtype`; what is not encoded is sent in `sent`."""
    codecs = []
    for param in params:
        own = codec if len(param.shape) > 1 else Plain(sent)
        allowed = own.refuses(param.shape, dtype, param.dim, plan.n)
        if allowed:
            raise FSDPValueError(
                f"{codec} cannot encode parameter {param.name!r}, {dtype} of shape {tuple(param.shape)}, cut along dim "
                f"{param.dim} into {plan.n} parts: {allowed}. Or give fully_shard a policy without it for this module"
            )
        codecs.append(own)
    return Encoded(plan, codecs, equal, 1 if settings.mesh.device.type == "cpu" else ALIGNMENT)


def over_replicas(
    params: Sequence[ShardedParameter], plan: FlatPlan, codec: Codec, sent: torch.dtype, axis: Axis, settings: Settings
) -> Encoded:
    """This rank's chunks of gradients with this plan, of which each replica along the axis adds some rows."""
    codecs = [codec if len(param.shape) > 1 else Plain(sent) for param in params]
    rows = FlatPlan(plan.own_shapes, [0] * len(params), axis.size, axis.index, True, plan.extra)
    return Encoded(rows, codecs, True, 1 if settings.mesh.device.type == "cpu" else ALIGNMENT)


class EncodedBucket(Bucket):
    """A bucket that gathers what a codec makes of the shards."""

    in_place = None

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings, equal: bool) -> None:
        super().__init__(params, settings, equal)
        _ = self._encoded  # so that what cannot be encoded raises at once

    @cached_property
    def _encoded(self) -> Encoded:
        codec, equal = self.settings.gather_codec, self.plan.equal
        assert codec is not None
        return encoded(self.params, self.plan, codec, self.dtype, self.compute_dtype, self.settings, equal)

    @property
    def gather_plan(self) -> FlatPlan:
        """The flat plan of what is gathered."""
        return self._encoded.plan

    def _gather_sizes(self) -> tuple[int, int, int]:
        plan = self.gather_plan
        moved = self.shard_bytes * (self.settings.rest_device != self.settings.mesh.device)
        return moved + 2 * plan.own_size, plan.total, plan.moved(1)  # the parts, and the section of them

    def gather(self, comm: Comm, tag: int, in_place: bool) -> Pending[Tensor]:
        return comm.gather(self.section(), self.gather_plan, self.settings.mesh.shard, tag)

    def section(self) -> Tensor:
        """What this rank sends."""
        shard = self.shard.detach().to(self.settings.mesh.device, non_blocking=True)
        return self._encoded.encode(self.plan.own_views(shard))

    def receive(self, pending: Pending[Tensor]) -> None:
        gathered = pending.wait()
        self.take()
        self._encoded.decode(gathered, self._places)

    @property
    def is_rounded(self) -> bool:
        return True

    def rounded(self, i: int, shard: Tensor) -> Tensor:
        return self._encoded.rounded(i, shard.detach().to(self.settings.mesh.device), self.compute_dtype)


# ------------------------------------------------------------------ tensor subclasses with hooks


def is_extended(parameter: Tensor) -> bool:
    """Whether a parameter, or its local tensor, is a subclass that consists of other tensors."""
    return has_inner_tensors(local_of(parameter))


class _Sent(NamedTuple):
    """The shapes and dtypes of what the first hook returned, and its metadata."""

    shapes: list[tuple[torch.Size, torch.dtype]]
    metadata: Any


class Hooks(Codec):
    """The hooks of one parameter's class, and what they have made."""

    def __init__(self, param: ShardedParameter, settings: Settings, warning: str) -> None:
        values: Any = param.values.detach()
        self.param, self._settings, self._warning = param, settings, warning
        kind = type(values).__name__
        missing = [name for name in _HOOKS if not hasattr(values, name)]
        if missing:
            raise FSDPError(
                f"parameter {param.name!r} is a {kind}, a tensor subclass without {' and '.join(missing)}: define both "
                "methods, or add the parameter to ignored_params"
            )
        wanted = len(inspect.signature(values.fsdp_pre_all_gather).parameters)
        if wanted not in (1, 5):
            raise FSDPValueError(
                f"{kind}.fsdp_pre_all_gather must take the argument mesh, or mesh, outer_size, outer_stride, module "
                f"and mp_policy, not {wanted} arguments"
            )
        if param.dim != 0:
            raise FSDPValueError(
                f"parameter {param.name!r} is a {kind}, which must be sharded along dim 0, not dim {param.dim}"
            )
        outer = (torch.Size(param.shape), values.stride(), param.slots[0].module, settings.precision)
        self._more = outer if wanted == 5 else ()
        self._n = settings.mesh.shard.size
        self._step = -(-param.shape[0] // self._n)  # the most rows of a rank
        self._sent = _Sent([], None)
        self._outputs: list[Tensor] = []
        self.memories: list[ReturnableMemory] = []  # none before the unsharded parameter is made

    def size(self, shape: Shape) -> list[Shape]:
        """A row of bytes for each rank; before the first gather it is not known how many."""
        if self._sent.shapes:
            return [(self._n, prod(size) * dtype.itemsize) for size, dtype in self._sent.shapes]
        dtype = self._settings.compute_dtype(self.param.values.dtype)
        return [(self._n, self._step * prod(shape[1:]) * dtype.itemsize)]

    def encode(self, values: Any) -> list[Tensor]:
        mesh = self._settings.mesh.mesh
        if mesh.ndim == 2:
            mesh = mesh[mesh.mesh_dim_names[1]] if mesh.mesh_dim_names else _last_dim(mesh)
        inputs, metadata = values.fsdp_pre_all_gather(mesh, *self._more)
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        uneven = self._step * self._n != self.param.shape[0]
        if uneven and any(x.ndim and x.shape[0] != self._step for x in inputs):
            raise FSDPError(
                f"{self.param.name!r} has {self.param.shape[0]} rows, which {self._n} does not divide evenly, so "
                f"fsdp_pre_all_gather of {type(values).__name__} must pad its tensors to {self._step} rows on every "
                f"rank, but returned the shapes {[tuple(x.shape) for x in inputs]}"
            )
        self._sent = _Sent([(x.shape, x.dtype) for x in inputs], metadata)
        return [x.contiguous().view(-1).view(torch.uint8) for x in inputs]

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Fill the unsharded parameter, or make it; `out` is this rank's shard, of which the hook is called."""
        param, local, first = self.param, out, not self.memories
        sent, device = self._sent, parts[0].device
        if first:
            made = [torch.empty(self._n * prod(size), dtype=dtype, device=device) for size, dtype in sent.shapes]
            self._outputs.extend(made)
        for memory in self.memories:
            memory.take_back()
        views = []
        for part, output, (size, _) in zip(parts, self._outputs, sent.shapes, strict=True):
            # Through .data, because for autograd gathering again must not count as a modification.
            output.data.view(torch.uint8).view(self._n, -1).copy_(part.view(self._n, -1))
            views.append(self._trimmed(output.view(self._n * size[0], *size[1:]) if size else output))
        dtype = self._settings.compute_dtype(local.dtype)
        with torch.no_grad():
            if not first:
                local.fsdp_post_all_gather(tuple(views), sent.metadata, dtype, out=param.unsharded_local)  # type: ignore[attr-defined]
            else:
                whole, inner = local.fsdp_post_all_gather(tuple(views), sent.metadata, dtype)  # type: ignore[attr-defined]
                if whole.shape != param.shape:
                    whole = whole.narrow(0, 0, param.shape[0])
                param.make_unsharded(whole, nn.Parameter)
                self._keep_track(inner)
        self._sent = sent._replace(metadata=None)

    def _trimmed(self, output: Tensor) -> Tensor:
        """`output` without the padding of the last ranks' parts."""
        wanted = self.param.shape[0]
        return output.narrow(0, 0, wanted) if output.ndim and output.shape[0] == self._step * self._n else output

    def _keep_track(self, inner: Any) -> None:
        """Note the memory to free between uses: that of the gathered tensors, and of what the hook made of them."""
        known: set[int] = set()
        for tensor in (*self._outputs, *inner):
            identity = storages.memory_of(tensor)
            if identity not in known:
                known.add(identity)
                self.memories.append(ReturnableMemory(tensor, self._warning))


class ExtendedBucket(EncodedBucket):
    """A bucket of such parameters. Each has its own memory, and sections always have equal length."""

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings) -> None:
        self.params, self.settings, self._equal = tuple(params), settings, True
        self.plan = self.plan_over(settings.mesh.shard, params)
        self._hooks = [Hooks(param, settings, self._warning()) for param in params]
        self._gather_plans: dict[tuple[Shape, ...], FlatPlan] = {}
        for i, param in enumerate(params):
            if param.sharded is None:
                with torch.no_grad():
                    param.make_sharded(self._own_chunk(i, param.values.detach()))
            param.unsharded_local = param.sharded._local
        self._locals = [param.sharded._local for param in params]

    def _own_chunk(self, i: int, whole: Tensor) -> Tensor:
        """This rank's rows, in memory for as many rows as the rank with most has."""
        rows, step = self.plan.own_shapes[i][0], -(-whole.shape[0] // self.plan.n)
        if whole.device.type != "meta":
            whole = whole.to(self.settings.rest_device)
        padded = whole.new_zeros((step, *whole.shape[1:]))
        own = padded.narrow(0, 0, rows)
        if rows:
            own.copy_(whole.narrow(0, step * self.plan.index, rows))
        return own

    # ------------------------------------------------------------------ sizes

    @property
    def gather_plan(self) -> FlatPlan:
        shapes = tuple([shape for hooks in self._hooks for shape in hooks.size(hooks.param.shape)])
        if shapes not in self._gather_plans:
            axis = self.settings.mesh.shard
            self._gather_plans[shapes] = FlatPlan(shapes, [0] * len(shapes), axis.size, axis.index, True)
        return self._gather_plans[shapes]

    @property
    def knows_sizes(self) -> bool:
        """Whether the classes have said how much they send."""
        return all(hooks.memories for hooks in self._hooks)

    @property
    def will_alias(self) -> bool:
        return False

    # ------------------------------------------------------------------ epochs

    def is_touched(self) -> bool:
        return bool(self._touched())

    def _touched(self) -> list[ShardedParameter]:
        """The parameters whose unsharded tensors users have written to."""
        seen = self._seen.counted  # empty before the first gather
        return [p for p, count in zip(self.params, seen, strict=False) if writes_to(p.unsharded_local) != count]

    def save_writes(self, current: bool) -> list[str]:
        """Raise if users have written to an unsharded parameter: only its class knows what that means for the shard.

        If the unsharded parameters are not `current`, their values are dropped.
        """
        touched = self._touched()
        if touched:
            self._remember_writes()
        if touched and current:
            param = touched[0]
            raise FSDPError(
                f"parameter {param.name!r} was written to while it was unsharded. It is a "
                f"{type(param.sharded._local).__name__}, whose class makes the unsharded parameter from what is "
                "gathered, so the write cannot be copied to the shards: write to the sharded parameter, between steps"
            )
        return []

    def put_back(self) -> None:
        """Do nothing: no write is saved."""

    # ------------------------------------------------------------------ unsharded parameters

    def prepare(self) -> None:
        """Do nothing: the first gather makes the unsharded parameters."""

    @property
    def _memories(self) -> Sequence[ReturnableMemory]:
        return [memory for hooks in self._hooks for memory in hooks.memories]

    def section(self) -> Tensor:
        device = self.settings.mesh.device
        with torch.no_grad():
            locals_ = [param.sharded._local.to(device) for param in self.params]
            encoded = [hooks.encode(local) for hooks, local in zip(self._hooks, locals_, strict=True)]
            return torch.cat([part for parts in encoded for part in parts])

    def receive(self, pending: Pending[Tensor]) -> None:
        parts = iter(self.gather_plan.rows(pending.wait()))
        for hooks, param in zip(self._hooks, self.params, strict=True):
            own = [next(parts)[0] for _ in hooks.size(param.shape)]
            hooks.decode(own, param.sharded._local)
        self._remember_writes()

    # ------------------------------------------------------------------ shards that users replaced

    @property
    def shard(self) -> Tensor:
        """One of them, for its dtype and device."""
        return self._locals[0]

    @property
    def shard_bytes(self) -> int:
        return sum(local.nbytes for local in self._locals)

    def shards_intact(self) -> bool:
        return all(param.sharded._local is local for param, local in zip(self.params, self._locals, strict=True))

    def suits_shards(self) -> bool:
        return are_alike(self.params)

    def _take_shards(self) -> None:
        for hooks, former in zip(self._hooks, self._locals, strict=True):
            param, local = hooks.param, hooks.param.sharded._local
            if not is_extended(local):
                raise FSDPError(
                    f"parameter {param.name!r} was a {type(former).__name__} and was replaced by a "
                    f"{type(local).__name__}: replace it by a tensor of the same class"
                )
            if not hooks.memories:
                param.unsharded_local = local
        self._locals[:] = [param.sharded._local for param in self.params]


def _last_dim(mesh: Any) -> Any:
    """The submesh of the last dim of a mesh without names."""
    axis = axis_of(mesh, mesh.ndim - 1)
    return DeviceMesh.from_group(axis.group, mesh.device_type) if axis.group is not None else mesh
