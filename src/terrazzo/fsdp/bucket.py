"""The parameters of a group that share a dtype: one flat shard buffer, one flat whole buffer, their traffic.

*Shard buffer*: this rank's chunks, one after the other.  The sharded parameters are views of it, and it is the
all-gather's input as it is (converted first, where the policy computes in another precision).

*Whole buffer*: the parameters as forward sees them, each aligned for vector units.  Its storage is given back while the
group is sharded and has new memory when it is whole again; the tensors, which autograd keeps, stay the same objects.
Where one rank holds everything in the right precision, the whole parameters simply are the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.direct import FIRST_TAG, start_gather
from terrazzo.fsdp.flat import FlatPlan
from terrazzo.fsdp.memory import ReturnableMemory
from terrazzo.fsdp.meshes import DataMesh
from terrazzo.fsdp.parameter import ShardedParameter, attributes_of
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, eq=False)
class Settings:
    """What all buckets of a group have in common."""

    mesh: DataMesh
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy

    @property
    def rest_device(self) -> torch.device:
        """Where shards rest."""
        offload = self.offload
        away = isinstance(offload, CPUOffloadPolicy) and offload.parameters
        return torch.device("cpu") if away else self.mesh.device

    @property
    def pinned(self) -> bool:
        """Whether what rests on the CPU does so in page-locked memory."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self.mesh.device.type != "cpu"

    @property
    def parks_state(self) -> bool:
        """Whether the optimizer's state rests on the CPU though it is used on the device."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.optimizer_state and not offload.parameters

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which precision parameters of `dtype` are gathered and used."""
        wanted = self.precision.param_dtype
        return wanted if wanted is not None and dtype.is_floating_point else dtype

    def empty_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        pinned = self.pinned and self.rest_device.type == "cpu"
        return torch.empty(numel, dtype=dtype, device=self.rest_device, pin_memory=pinned)


class Bucket:
    """Some parameters of one dtype, sharded on one mesh."""

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings) -> None:
        """Takes the parameters' values from their `whole_local`, and makes their sharded faces."""
        self.params = tuple(params)
        self.settings = settings
        mesh = settings.mesh
        self.plan = self.plan_over(mesh.shard, self.params)
        self.dtype = params[0].whole_local.dtype
        self._attributes = [attributes_of(p.whole_local) for p in params]  # type: ignore[arg-type]
        wholes = [p.whole_local.detach() for p in params]
        self.shard = (
            torch.empty(self.plan.own_size, dtype=self.dtype, device="meta")
            if wholes[0].device.type == "meta"
            else settings.empty_shard(self.plan.own_size, self.dtype)
        )
        with torch.no_grad():
            views = self.plan.own_views(self.shard)
            if self.shard.device.type != "meta":
                torch._foreach_copy_(views, self.plan.own_chunks(wholes))
        for param, view, attributes in zip(params, views, self._attributes, strict=True):
            param.make_sharded(view, attributes)
            param.whole_local = view  # lets go of the original
        self._remember_shards()
        self._whole: Tensor | None = None
        self._pieces: list[Tensor] = []
        self._memory: ReturnableMemory | None = None  # of the whole buffer, unless the shards are the parameters
        self.tag = FIRST_TAG  # of its messages; the next one is that of its gradients
        self.aliased = False  # whether the whole parameters are the shards themselves

    def plan_over(self, axis: Axis, params: Sequence[ShardedParameter]) -> FlatPlan:
        """How `params` lie in buffers over `axis`."""
        equal = self.settings.mesh.device.type != "cpu"
        return FlatPlan([p.shape for p in params], [p.dim for p in params], axis.size, axis.index, equal)

    @property
    def is_meta(self) -> bool:
        return self.shard.device.type == "meta"

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.settings.compute_dtype(self.dtype)

    @property
    def whole_bytes(self) -> int:
        """Memory of the whole parameters, 0 if they are the shards themselves."""
        return 0 if self._is_alias else self._layout_of_whole()[1] * self.compute_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Memory of what a gather brings, until it is copied out."""
        return 0 if self.plan.n == 1 else self.plan.total * self.compute_dtype.itemsize

    # ------------------------------------------------------------------ whole parameters

    @property
    def _is_alias(self) -> bool:
        alone = self.plan.n == 1 and self.compute_dtype is self.dtype
        return alone and self.settings.rest_device == self.settings.mesh.device

    def _layout_of_whole(self) -> tuple[list[int], int]:
        """Where each parameter begins in the whole buffer, and how long that is."""
        step = max(1, _ALIGNMENT // self.compute_dtype.itemsize)
        starts, end = [], 0
        for param in self.params:
            starts.append(end)
            end += -(-prod(param.shape) // step) * step
        return starts, end

    def prepare(self) -> None:
        """Make the whole faces, once there are values."""
        if self._whole is not None or self.is_meta:
            return
        self.aliased = self._is_alias
        with torch.inference_mode(False), torch.no_grad():
            if self.aliased:
                self._whole, locals_ = self.shard, self.plan.own_views(self.shard)
            else:
                starts, end = self._layout_of_whole()
                self._whole = torch.empty(end, dtype=self.compute_dtype, device=self.settings.mesh.device)
                locals_ = [
                    self._whole[start : start + prod(p.shape)].view(p.shape)
                    for start, p in zip(starts, self.params, strict=True)
                ]
                self._pieces = self.plan.pieces(locals_)
            for param, local, attributes in zip(self.params, locals_, self._attributes, strict=True):
                param.make_whole(local, attributes)
            self._memory = None if self.aliased else ReturnableMemory(self._whole, self._warning())
            self.free()

    def _warning(self) -> str:
        return (
            f"{self.params[0].name!r}, a parameter sharded together with it, or a view of one was used after the "
            "module had finished, when fully_shard had freed it: use it in the module's forward, or clone it there, or "
            "keep the parameters with reshard_after_forward=False or unshard()"
        )

    def free(self) -> None:
        """Give the whole parameters' memory back."""
        if self._memory is not None:
            self._memory.give_back()

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that `free` gives back."""
        return self._memory is not None and self._memory.owns(tensor)

    def start_gather(self, buffer: Tensor, plan: FlatPlan, axis: Axis, careful: bool) -> Pending[Tensor]:
        """Begin to collect from `axis` what is cut by `plan`, this rank's part being `buffer`."""
        if buffer.dtype is not self.compute_dtype or buffer.device != self.settings.mesh.device:
            buffer = buffer.to(self.settings.mesh.device, self.compute_dtype, non_blocking=True)
        return start_gather(buffer, axis, plan.sizes, self.tag, careful)

    def fill(self, gathered: Tensor, plan: FlatPlan, pieces: list[Tensor]) -> None:
        """Make the parameters whole from what was gathered."""
        if self._memory is not None:
            self._memory.take_back()
        plan.unpack(gathered, pieces)

    @property
    def pieces(self) -> list[Tensor]:
        """The whole parameters as this bucket's plan fills them."""
        return self._pieces

    def whole_locals(self) -> list[Tensor]:
        """The whole parameters without history, for reading while the group is whole."""
        return [p.whole_local.detach() for p in self.params]

    # ------------------------------------------------------------------ shards that users replaced

    def _remember_shards(self) -> None:
        self._locals = [p.sharded._local for p in self.params]
        self._pointers = [local.data_ptr() for local in self._locals]

    def shards_intact(self) -> bool:
        """Whether the sharded parameters still are the views of the shard buffer that they were."""
        return [p.sharded._local.data_ptr() for p in self.params] == self._pointers

    def rebuild(self) -> None:
        """Collect shards that now lie elsewhere (moved, materialised, loaded by assignment) in a new buffer."""
        locals_ = [p.sharded._local.detach() for p in self.params]
        dtype = locals_[0].dtype
        if locals_[0].device.type == "meta":
            self.shard = torch.empty(self.plan.own_size, dtype=dtype, device="meta")
        else:
            self.shard = self.settings.empty_shard(self.plan.own_size, dtype)
        changed, self.dtype = self.dtype is not dtype, dtype
        with torch.no_grad():
            views = self.plan.own_views(self.shard)
            if not self.is_meta:
                torch._foreach_copy_(views, locals_)
            for param, view in zip(self.params, views, strict=True):
                local = param.sharded._local
                if local.device == view.device and local.dtype == view.dtype:
                    local.data = view  # the tensor that an optimizer may know stays the same object
                else:
                    param.make_sharded(view, self._attributes[self.params.index(param)])
        self._remember_shards()
        if self._whole is not None and (self.aliased or changed or self._is_alias):
            self._whole = None
            self.prepare()
