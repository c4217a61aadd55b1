"""Special memory for communication: the process group's own, or symmetric memory of CUDA devices; and buffers that
are not freed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from terrazzo._torch import symmetric
from terrazzo._torch.groups import allocates, empty_from
from terrazzo.comm.axis import Axis
from terrazzo.comm.waits import barrier
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.meshes import DataMesh


class GroupMemory:
    """Memory that the backend allocates, and sends from without copies, as NCCL does."""

    only_sums = False  # whether reductions there cannot average

    def serves(self, axis: Axis, device: torch.device) -> bool:
        """Whether there is such memory for communication along the axis."""
        return axis.group is not None and allocates(axis.group, device)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
        """Allocate a buffer."""
        assert axis.group is not None
        return empty_from(axis.group, numel, dtype, device)

    def announce(self, tensor: Tensor, axis: Axis) -> None:
        """Called before the buffer is communicated."""


class SymmetricMemory(GroupMemory):
    """Memory of a pool whose addresses all ranks have exchanged."""

    only_sums = True

    def __init__(self, meshes: Sequence[DataMesh], backend: str) -> None:
        if backend != "NCCL":
            raise FSDPValueError(f"the backend for set_symm_mem_for_comm must be 'NCCL', not {backend!r}")
        kind = meshes[0].device.type
        if kind != "cuda":
            raise FSDPError(
                f"set_symm_mem_for_comm needs CUDA devices, but this module is sharded over {kind} devices: leave the "
                "call out"
            )
        symmetric.use_backend(backend)
        for mesh in meshes:
            if mesh.shard.group is not None:
                barrier(mesh.shard.group)  # addresses can be exchanged only when the connections exist

    def serves(self, axis: Axis, device: torch.device) -> bool:
        return axis.group is not None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
        return symmetric.empty(numel, dtype, device)

    def announce(self, tensor: Tensor, axis: Axis) -> None:
        assert axis.group is not None
        symmetric.rendezvous(tensor, axis.group.group_name)


class DoubleBuffers:
    """Two buffers of each kind and size, which units use by turns and which are not freed.

    A unit gives one back when it frees its memory by the plan. So the unit that takes it next waits, on its stream, as
    for memory that was freed there.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[Tensor]] = {}
        self._taken: dict[int, tuple[Hashable, Tensor]] = {}

    def take(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A buffer of those with this key, or one that `make` makes."""
        idle = self._idle.setdefault(key, [])
        if idle:
            buffer = idle.pop(0)
        else:
            with torch.inference_mode(False):  # later steps, in other modes, write to it
                buffer = make()
        self._taken[id(buffer)] = key, buffer
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer for the next use, if it is one of these; of more than two of a key the others are freed."""
        key, _ = self._taken.pop(id(buffer), (None, None))
        if key is not None and len(self._idle[key]) < 2:
            self._idle[key].append(buffer)
