"""The settings of a group: those of its `fully_shard` call, and those that users change afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.comm.codecs import Codec
from terrazzo.fsdp.meshes import DataMesh
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from terrazzo.fsdp.run.staging import DoubleBuffers, GroupMemory

AllReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings that a `fully_shard` call makes."""

    mesh: DataMesh
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy

    @property
    def rest_device(self) -> torch.device:
        """The device on which shards are kept."""
        offload = self.offload
        away = isinstance(offload, CPUOffloadPolicy) and offload.parameters
        return torch.device("cpu") if away else self.mesh.device

    @property
    def pinned(self) -> bool:
        """Whether what is kept on the CPU is in page-locked memory."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self.mesh.device.type != "cpu"

    @property
    def parks_state(self) -> bool:
        """Whether optimizer state is kept on the CPU between steps while parameters are on the device."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.optimizer_state and not offload.parameters

    @property
    def pinned_shards(self) -> bool:
        """Whether the shards are in page-locked memory on the CPU, from which copies run in the background."""
        return self.pinned and self.rest_device.type == "cpu"

    @property
    def parks_gradients(self) -> bool:
        """Whether gradients are kept on the CPU until they are asked for, while parameters are on the device."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.gradients and not offload.parameters

    @property
    def gradients_device(self) -> torch.device:
        """The device on which reduced gradients are kept."""
        return torch.device("cpu") if self.parks_gradients else self.rest_device

    # PyTorch's policies, which are taken too, have no codecs.
    @property
    def gather_codec(self) -> Codec | None:
        return getattr(self.precision, "gather_codec", None)

    @property
    def reduce_codec(self) -> Codec | None:
        return getattr(self.precision, "reduce_codec", None)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters of `dtype` are gathered and used."""
        wanted = self.precision.param_dtype
        return wanted if wanted is not None and dtype.is_floating_point else dtype


class _Allocates(Protocol):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for communication."""


class AllGather(_Allocates, Protocol):
    """A custom all-gather, with PyTorch's interface."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Concatenate the inputs of all ranks into the output."""


class ReduceScatter(_Allocates, Protocol):
    """A custom reduce-scatter, with PyTorch's interface."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce the inputs of all ranks; each rank gets its part."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The settings of a group that users change, without its switches."""

    reduce_buffers: int  # buffers of packed gradients that may be in reduction when the next is packed
    coalesce_bytes: int  # of parameters in a unit of several groups, at most
    apart: bool = False  # whether it always has a unit of its own, because the user has unsharded it
    auto_reshard: bool = False  # whether only the root is not resharded after forward
    forward_prefetch: tuple[Any, ...] | None = None  # groups
    backward_prefetch: tuple[Any, ...] | None = None
    divisor: float | None = None  # None: the number of ranks
    hook: AllReduceHook | None = None
    hook_stream: Any = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    force_sum: bool = False
    reduce_axes: dict[Axis, Axis] = field(default_factory=dict)  # by shard axis, the axis whose group reduces
    staging: GroupMemory | None = None  # special memory for communication; None: ordinary memory
    buffers: DoubleBuffers | None = None  # buffers for communication that are not freed

    @property
    def usual(self) -> bool:
        """Whether communication is terrazzo's own, in ordinary memory that is freed."""
        others = self.all_gather, self.reduce_scatter, self.staging, self.buffers
        return all(other is None for other in others)
