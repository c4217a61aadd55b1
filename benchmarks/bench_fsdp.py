"""A training step of fully_shard: ours, torch's FSDP2 and DDP, and a plain module, on gloo.

The model is a stack of residual blocks, each a group, and a root; a step is forward, backward, AdamW and zero_grad.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import Budget, Implementations, Setting, case
from terrazzo.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def _step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded(model: Model, function: Callable[..., Any], **options: Any) -> Model:
    for block in model.blocks:
        function(block, **options)
    function(model, **options)
    return model


def _compare(setting: Setting, width: int, blocks: int, batch: int) -> Implementations:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (setting.world,))
    model, x = Model(width, blocks), torch.randn(batch, width)
    return {
        "plain": _step(copy.deepcopy(model), x),
        "terrazzo": _step(_sharded(copy.deepcopy(model), fully_shard, mesh=mesh), x),
        "torch": _step(_sharded(copy.deepcopy(model), torch_fully_shard, mesh=mesh), x),
        "ddp": _step(DistributedDataParallel(copy.deepcopy(model)), x),
    }


@case(budget=Budget("time", 0.5))
def narrow_alone(setting: Setting) -> Implementations:
    """Width 64, 24 blocks, batch 8: what the library costs when there is nobody to talk to."""
    return _compare(setting, 64, 24, 8)


@case(world=2, budget=Budget("time", 0.5))
def narrow(setting: Setting) -> Implementations:
    """The same on two ranks: latency counts."""
    return _compare(setting, 64, 24, 8)


@case(world=2, budget=Budget("time", 0.8), repetitions=11)
def wide(setting: Setting) -> Implementations:
    """Width 512, 6 blocks, batch 64: bytes count."""
    return _compare(setting, 512, 6, 64)
