"""What the parameters of one `fully_shard` call have in common, and what users set for them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.fsdp.meshes import DataMesh
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

AllReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Settings:
    """What is decided when `fully_shard` is called."""

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


class _Allocates(Protocol):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is communicated."""


class AllGather(_Allocates, Protocol):
    """An all-gather of a user's own, as PyTorch's interface has it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Concatenate the inputs of all ranks in the output."""


class ReduceScatter(_Allocates, Protocol):
    """A reduce-scatter of a user's own, as PyTorch's interface has it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce the inputs of all ranks, each part to the rank whose it is."""


class Staging(Protocol):
    """Memory from which a backend communicates more quickly."""

    def serves(self, axis: Axis, device: torch.device) -> bool:
        """Whether there is such memory for what is communicated along the axis."""

    def reduces_from(self, options: Options) -> bool:
        """Whether reductions lie there as well as gathers."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
        """Some of it."""

    def announce(self, tensor: Tensor, axis: Axis) -> None:
        """It is about to be communicated."""


@dataclass(slots=True)
class Options:
    """What users set about the communication of a group."""

    all_reduce: bool = True  # over the replicas of HSDP
    divisor: float | None = None  # None: the number of ranks
    hook: AllReduceHook | None = None
    hook_stream: Any = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    force_sum: bool = False
    reduce_axes: dict[Axis, Axis] = field(default_factory=dict)  # for those that shard, connections to reduce over
    reduce_buffers: int = 1  # packed gradients that may be under reduction when the next are packed
    staging: Staging | None = None  # where what is communicated lies, if not in ordinary memory

    @property
    def usual(self) -> bool:
        """Whether nothing was set about who gathers and reduces, and in which memory."""
        return self.all_gather is None and self.reduce_scatter is None and self.staging is None
