"""Activations that are equal on the ranks of a tensor-parallel mesh, kept sharded between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.layout import Replicate, Shard
from terrazzo.tensor.dtensor import DTensor

__all__ = ["input_reshard"]


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """The module, whose forward keeps for backward only this rank's part of each replicated tensor.

    Backward gathers the parts. Plain tensors count as equal on all ranks of the mesh, as the inputs of tensor
    parallelism are.

    Args:
        module: The module.
        tp_device_mesh: The mesh of the tensor parallelism, of one dim.
        input_reshard_dim: The dim along which tensors are sharded. None: they stay whole.

    >>> from terrazzo.tensor import init_device_mesh
    >>> linear = input_reshard(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), 0)
    >>> linear(torch.ones(4, 2)).sum().backward()
    """
    if input_reshard_dim is None:
        return module
    shard = Shard(input_reshard_dim)
    running: list[torch.autograd.graph.saved_tensors_hooks] = []  # of calls in calls

    def pack(x: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        if isinstance(x, DTensor):
            if not all(p.is_replicate() for p in x.placements):
                return x
            mesh, placements = x.device_mesh, x.placements
            kept = x.detach().redistribute(tp_device_mesh, [shard])
            return lambda: kept.redistribute(mesh, placements)
        if x.numel() < tp_device_mesh.size() or not -x.dim() <= input_reshard_dim < x.dim():
            return x
        part = DTensor.from_local(x.detach(), tp_device_mesh, [Replicate()]).redistribute(placements=[shard])
        return lambda: part.full_tensor()

    def enter(_: nn.Module, inputs: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept() if callable(kept) else kept)
        hooks.__enter__()
        running.append(hooks)

    def leave(_: nn.Module, inputs: Any, output: Any) -> None:
        if running:
            running.pop().__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return module
