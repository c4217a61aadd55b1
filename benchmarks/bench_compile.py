"""`terrazzo.compile` against `torch.compile`: a training step of a block, alone, and of a model under `fully_shard`.

Both are compiled by Inductor, so what differs is what stands around the graphs: keys and wrappers here, guards there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.utils import parametrize

import terrazzo
from benchmarks.cases import Budget, Implementations, Setting, case
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width_of_head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).view(y.shape[0], y.shape[1], -1, self.width_of_head).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(y.shape[0], y.shape[1], -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _parallel(block: Block, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (1,))
    columns = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(
        block,
        mesh,
        {
            **{name: SequenceParallel() for name in ("norm1", "norm2")},
            **dict.fromkeys(("q", "k", "v", "up"), columns),
            **dict.fromkeys(("out", "down"), rows),
        },
    )


def _step(forward: Callable[[Any], Any], block: nn.Module, x: Any) -> Callable[[], None]:
    def step() -> None:
        forward(x).square().mean().backward()
        for parameter in block.parameters():
            parameter.grad = None

    return step


def _blocks(device: torch.device, width: int, length: int) -> Implementations:
    plain = Block(width, 4).to(device)
    alone = copy.deepcopy(plain)
    ours = _parallel(copy.deepcopy(plain), device)
    x = torch.randn(2, length, width).to(device)
    placed = distribute_tensor(x, init_device_mesh(device.type, (1,)), [Shard(1)])
    torch._dynamo.reset()
    return {
        "plain": _step(plain, plain, x),
        "torch": _step(torch.compile(alone, fullgraph=True), alone, x),
        "eager": _step(ours, ours, placed),
        "terrazzo": _step(terrazzo.compile(ours, fullgraph=True), ours, placed),
    }


@case(budget=Budget("time", 1.05), runs_on="both", imitable=False)
def block(setting: Setting) -> Implementations:
    """A tensor-parallel block with sequence parallelism."""
    return _blocks(setting.device, 64, 32)


@case(budget=Budget("time", 1.05), runs_on="both", imitable=False)
def wide_block(setting: Setting) -> Implementations:
    """The same, where computing takes most of the time."""
    return _blocks(setting.device, 256, 64)


class _Gathered(nn.Module):
    def forward(self, p: DTensor) -> DTensor:
        return p.redistribute(placements=[Replicate()])


@case(world=2, budget=Budget("time", 1.0), repetitions=11, runs_on="both", imitable=False)
def sharded(setting: Setting) -> Implementations:
    """Four blocks under `fully_shard`, each a graph; beside them one graph of sharded tensors, gathers inside."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    plain = nn.Sequential(*[Block(64, 4) for _ in range(2 if setting.quick else 4)]).to(setting.device)
    x = torch.randn(2, 32, 64).to(setting.device)
    eager, ours, theirs, graph = (copy.deepcopy(plain) for _ in range(4))
    for model, function in ((eager, fully_shard), (ours, fully_shard), (theirs, torch_fully_shard)):
        for each in model:
            if model is theirs:
                each.compile(fullgraph=True)
            function(each, mesh=mesh)
        function(model, mesh=mesh)
    for module in list(graph.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, _Gathered(), unsafe=True)
    batch = distribute_tensor(torch.cat([x] * setting.world), mesh, [Shard(0)])
    return {
        "terrazzo": _step(terrazzo.compile(ours, fullgraph=True), ours, x),
        "torch": _step(theirs, theirs, x),
        "eager": _step(eager, eager, x),
        "graph": _step(terrazzo.compile(graph, fullgraph=True), graph, batch),
    }
