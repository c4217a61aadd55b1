"""Symmetric memory: buffers at one address on all ranks of a group, which CUDA devices read from each other."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo._torch.declared import later

_module = later(
    "torch.distributed._symmetric_memory", "fully_shard gathers into symmetric memory, if the user asks for it"
)


def use_backend(name: str) -> None:
    """Have this backend make symmetric memory from now on."""
    _module().set_backend(name)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Memory of a pool that is symmetric, and used again."""
    with torch.cuda.use_mem_pool(_module().get_mem_pool(device)):
        return torch.empty(numel, dtype=dtype, device=device)


def rendezvous(tensor: torch.Tensor, group_name: str) -> None:
    """Let the ranks of a group know where it lies on each; known ones cost nothing."""
    _module().rendezvous(tensor, group=group_name)
