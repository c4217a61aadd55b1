"""Memory for what is communicated: the process group's own, or symmetric memory of CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo._torch import symmetric
from terrazzo._torch.groups import allocates, empty_from
from terrazzo.comm.axis import Axis
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.meshes import DataMesh
from terrazzo.fsdp.settings import Options, Staging


class GroupMemory:
    """What a backend gives itself, as NCCL does: it sends from there without copies."""

    def serves(self, axis: Axis, device: torch.device) -> bool:
        return axis.group is not None and allocates(axis.group, device)

    def reduces_from(self, options: Options) -> bool:
        return True

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
        assert axis.group is not None
        return empty_from(axis.group, numel, dtype, device)

    def announce(self, tensor: Tensor, axis: Axis) -> None:
        """The backend knows."""


class SymmetricMemory:
    """Memory of a pool that all ranks know of each other."""

    def __init__(self, meshes: Sequence[DataMesh], backend: str) -> None:
        if backend != "NCCL":
            raise FSDPValueError(f"set_symm_mem_for_comm knows the backend 'NCCL' only, got {backend!r}")
        kind = meshes[0].device.type
        if kind != "cuda":
            raise FSDPError(
                f"set_symm_mem_for_comm: only CUDA devices have symmetric memory, and this module is sharded over "
                f"{kind} devices: leave the call out there"
            )
        symmetric.use_backend(backend)
        for mesh in meshes:
            if mesh.shard.group is not None:
                dist.barrier(group=mesh.shard.group)  # its connections have to be there when addresses are exchanged

    def serves(self, axis: Axis, device: torch.device) -> bool:
        return axis.group is not None

    def reduces_from(self, options: Options) -> bool:
        return options.force_sum  # all that NCCL reduces there are sums

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
        return symmetric.empty(numel, dtype, device)

    def announce(self, tensor: Tensor, axis: Axis) -> None:
        assert axis.group is not None
        symmetric.rendezvous(tensor, axis.group.group_name)


def use_staging(group: Group, staging: Staging | None) -> None:
    """Have a group's communication lie there."""
    options = group.options
    own = [
        name
        for name, comm in (
            ("set_custom_all_gather", options.all_gather),
            ("set_custom_reduce_scatter", options.reduce_scatter),
        )
        if comm is not None
    ]
    if own:
        raise FSDPValueError(
            f"{own[0]} was called on this module, so its communication allocates its memory itself: allocate there "
            "what should not be ordinary memory"
        )
    options.staging = staging
