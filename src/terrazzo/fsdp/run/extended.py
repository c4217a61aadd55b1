"""A parameter that is a tensor subclass with hooks for the all-gather.

Its class defines PyTorch's hooks:

    fsdp_pre_all_gather(self, mesh) -> (inputs, metadata)
    fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None) -> (tensor, tensors to free); None with out

The sharded parameter is of this class on every rank. Before each gather, the first hook returns plain tensors of the
same size on all ranks, which are gathered as bytes. The second hook makes the unsharded parameter from the results the
first time, and later fills it (`out`), so that autograd's saved tensors stay the same objects.
"""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch import storages
from terrazzo._torch.counting import writes_to
from terrazzo._torch.dispatching import has_inner_tensors
from terrazzo._torch.tensors import version_of
from terrazzo.comm.axis import axis_of
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.pending import Pending
from terrazzo.comm.sections import FIRST_TAG
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.parameter import ShardedParameter, attributes_of
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.memory import ReturnableMemory
from terrazzo.fsdp.settings import Settings
from terrazzo.tensor import DTensor

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_extended(parameter: Tensor) -> bool:
    """Whether a parameter, or its local tensor, is a subclass that consists of other tensors."""
    local = parameter._local if isinstance(parameter, DTensor) else parameter
    return has_inner_tensors(local)


class ExtendedBucket(Bucket):
    """A bucket with one such parameter."""

    def __init__(self, param: ShardedParameter, settings: Settings) -> None:
        whole = param.values.detach()
        self.params = (param,)
        self.settings = settings
        self.equal = True
        self.tag = FIRST_TAG
        self.dtype = whole.dtype
        self.aliased = False
        self.pieces: list[Tensor] = []
        self._check(param, whole)
        self._outer = (torch.Size(param.shape), whole.stride())
        self._epochs_before = 0
        self.plan = FlatPlan([param.shape], [0], settings.mesh.shard.size, settings.mesh.shard.index, True)
        with torch.no_grad():
            param.attributes = _plain_attributes(param.unsharded_local)
            param.make_sharded(self._own_chunk(whole))
        param.unsharded_local = param.sharded._local
        self.shard = param.sharded._local
        self._gather_plan = self.plan
        self._gathered: list[tuple[torch.Size, torch.dtype]] = []
        self._metadata: Any = None
        self._outputs: list[Tensor] = []
        self._memories: list[ReturnableMemory] = []
        self._filled: list[int] = []
        self._version = 0  # of the unsharded parameter, when nobody but its class had written there

    def _check(self, param: ShardedParameter, whole: Tensor) -> None:
        kind = type(whole).__name__
        missing = [name for name in HOOKS if not hasattr(whole, name)]
        if missing:
            raise FSDPError(
                f"parameter {param.name!r} is a {kind}, a tensor subclass without {' and '.join(missing)}: define both "
                "methods, or add the parameter to ignored_params"
            )
        wanted = len(inspect.signature(whole.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]
        if wanted not in (1, 5):
            raise FSDPValueError(
                f"{kind}.fsdp_pre_all_gather must take the argument mesh, or mesh, outer_size, outer_stride, module "
                f"and mp_policy, not {wanted} arguments"
            )
        self._takes_all = wanted == 5
        if param.dim != 0:
            raise FSDPValueError(
                f"parameter {param.name!r} is a {kind}, which must be sharded along dim 0, not dim {param.dim}"
            )

    def _own_chunk(self, whole: Tensor) -> Tensor:
        """This rank's rows, in memory for as many rows as the rank with most has."""
        plan = self.plan
        rows = plan.own_shapes[0][0]
        step = -(-whole.shape[0] // plan.n)
        if whole.device.type != "meta":
            whole = whole.to(self.settings.rest_device)
        padded = whole.new_zeros((step, *whole.shape[1:]))
        own = padded.narrow(0, 0, rows)
        if rows:
            own.copy_(whole.narrow(0, step * plan.index, rows))
        return own

    # ------------------------------------------------------------------ sizes

    @property
    def is_meta(self) -> bool:
        return self.shard.device.type == "meta"

    @property
    def gather_plan(self) -> FlatPlan:
        return self._gather_plan

    @property
    def will_alias(self) -> bool:
        return False

    @property
    def unsharded_bytes(self) -> int:
        return prod(self.params[0].shape) * self.compute_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        known = sum(prod(size) * dtype.itemsize for size, dtype in self._gathered) * self.plan.n
        return known or self.unsharded_bytes

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        return self._epochs_before + version_of(self.params[0].sharded._local)

    def _note_increments(self, written: list[int]) -> None:
        self._version += 1

    def is_touched(self) -> bool:
        return bool(self._memories) and self._writes() != self._version

    def save_writes(self, current: bool) -> list[str]:
        """Raise if users have written to the unsharded parameter: only its class knows what that means for the shard.

        If the unsharded parameter is not `current`, its value is dropped.
        """
        written = self.is_touched()
        if written:
            self._version = self._writes()
        if written and current:
            param = self.params[0]
            raise FSDPError(
                f"parameter {param.name!r} was written to while it was unsharded. It is a "
                f"{type(param.sharded._local).__name__}, whose class makes the unsharded parameter from what is "
                "gathered, so the write cannot be copied to the shards: write to the sharded parameter, between steps"
            )
        return []

    def _writes(self) -> int:
        return writes_to(self.params[0].unsharded_local)

    def put_back(self) -> None:
        """Do nothing: no write is saved."""

    def shards_intact(self) -> bool:
        return self.params[0].sharded._local is self.shard

    # ------------------------------------------------------------------ unsharded parameters

    def prepare(self) -> None:
        """Do nothing: the first gather makes the unsharded parameter."""

    def free(self) -> None:
        for memory in self._memories:
            memory.give_back()

    def owns(self, tensor: Tensor) -> bool:
        return any(memory.owns(tensor) for memory in self._memories)

    def to_send(self, buffer: Tensor) -> Tensor:
        param, settings = self.params[0], self.settings
        local: Any = buffer if buffer.device == settings.mesh.device else buffer.to(settings.mesh.device)
        mesh = settings.mesh.mesh
        if mesh.ndim == 2:
            mesh = mesh[mesh.mesh_dim_names[1]] if mesh.mesh_dim_names else _last_dim(mesh)
        with torch.no_grad():
            if self._takes_all:
                module = param.slots[0].module
                inputs, self._metadata = local.fsdp_pre_all_gather(mesh, *self._outer, module, settings.precision)
            else:
                inputs, self._metadata = local.fsdp_pre_all_gather(mesh)
            inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
            step = -(-param.shape[0] // self.plan.n)
            uneven = step * self.plan.n != param.shape[0]
            if uneven and any(x.ndim and x.shape[0] != step for x in inputs):
                raise FSDPError(
                    f"{param.name!r} has {param.shape[0]} rows, which {self.plan.n} does not divide evenly, so "
                    f"fsdp_pre_all_gather of {type(local).__name__} must pad its tensors to {step} rows on every rank, "
                    f"but returned the shapes {[tuple(x.shape) for x in inputs]}"
                )
            self._gathered = [(x.shape, x.dtype) for x in inputs]
            sent = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in inputs])
        axis = settings.mesh.shard
        self._gather_plan = FlatPlan([(axis.size, sent.numel())], [0], axis.size, axis.index, True)
        return sent

    def receive(self, pending: Pending[Tensor]) -> None:
        self.fill(pending.wait(), self.plan, self.pieces)

    def fill(self, gathered: Tensor, plan: FlatPlan, pieces: list[Tensor]) -> None:
        param, n = self.params[0], self.plan.n
        local: Any = param.sharded._local
        first = not self._memories
        if first:
            self._outputs = [
                torch.empty(n * prod(size), dtype=dtype, device=gathered.device) for size, dtype in self._gathered
            ]
        for memory in self._memories:
            memory.take_back()
        rows = gathered.view(n, -1)
        start = 0
        views = []
        for output, (size, dtype) in zip(self._outputs, self._gathered, strict=True):
            length = prod(size) * dtype.itemsize
            # Through .data, because for autograd gathering again must not count as a modification.
            output.data.view(torch.uint8).view(n, length).copy_(rows[:, start : start + length])
            start += length
            views.append(self._trimmed(output.view(n * size[0], *size[1:]) if size else output))
        dtype = self.compute_dtype
        with torch.no_grad():
            if not first:
                local.fsdp_post_all_gather(tuple(views), self._metadata, dtype, out=param.unsharded_local)
            else:
                made, inner = local.fsdp_post_all_gather(tuple(views), self._metadata, dtype)
                if made.shape != param.shape:
                    made = made.narrow(0, 0, param.shape[0])
                param.make_unsharded_of(made)
                self._keep_track(inner)
        self._metadata = None
        self._version = self._writes()

    def _trimmed(self, output: Tensor) -> Tensor:
        """`output` without the padding of the last ranks' parts."""
        step, wanted = -(-self.params[0].shape[0] // self.plan.n), self.params[0].shape[0]
        return output.narrow(0, 0, wanted) if output.ndim and output.shape[0] == step * self.plan.n else output

    def _keep_track(self, inner: Any) -> None:
        """Note the memory to free between uses: that of the gathered tensors, and of what the hook made of them."""
        known: set[int] = set()
        for tensor in (*self._outputs, *inner):
            identity = storages.memory_of(tensor)
            if identity not in known:
                known.add(identity)
                self._memories.append(ReturnableMemory(tensor, self._warning()))

    # ------------------------------------------------------------------ shards that users replaced

    def use_equal_sections(self) -> None:
        """They are."""

    def rebuild(self) -> None:
        param = self.params[0]
        local = param.sharded._local
        if not is_extended(local):
            raise FSDPError(
                f"parameter {param.name!r} was a {type(self.shard).__name__} and was replaced by a "
                f"{type(local).__name__}: replace it by a tensor of the same class"
            )
        epoch = self.epoch
        self.shard, self.dtype = local, local.dtype
        if not self._memories:
            param.unsharded_local = local
        self._epochs_before += max(0, epoch + 1 - self.epoch)


def _last_dim(mesh: Any) -> Any:
    """The submesh of the last dim of a mesh without names."""
    axis = axis_of(mesh, mesh.ndim - 1)
    return DeviceMesh.from_group(axis.group, mesh.device_type) if axis.group is not None else mesh


def _plain_attributes(parameter: Any) -> dict[str, Any]:
    """Attributes that users set on the parameter, without those that its class sets."""
    kept, _ = parameter.__tensor_flatten__()
    own = vars(parameter.detach())
    return {name: value for name, value in attributes_of(parameter).items() if name not in kept and name not in own}


__all__ = ["HOOKS", "ExtendedBucket", "is_extended"]
