"""Symmetric memory: buffers on all ranks of a group that the CUDA devices can read from each other."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo._torch.declared import later

_module = later(
    "torch.distributed._symmetric_memory", "fully_shard gathers into symmetric memory, if the user asks for it"
)


def use_backend(name: str) -> None:
    """Use this backend for symmetric memory from now on."""
    _module().set_backend(name)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Memory from a pool of symmetric memory, which is reused."""
    with torch.cuda.use_mem_pool(_module().get_mem_pool(device)):
        return torch.empty(numel, dtype=dtype, device=device)


def rendezvous(tensor: torch.Tensor, group_name: str) -> None:
    """Exchange the buffer's addresses among the ranks of a group; for a known buffer this costs nothing."""
    _module().rendezvous(tensor, group=group_name)
