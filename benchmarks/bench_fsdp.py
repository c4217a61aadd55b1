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
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import Budget, Implementations, RunsOn, Setting, case
from benchmarks.fsdp_scale import growth
from terrazzo.engine import initialize
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard


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
    if setting.quick:
        width, blocks, batch = 64, min(blocks, 4), 8
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    model, x = Model(width, blocks).to(setting.device), torch.randn(batch, width).to(setting.device)
    return {
        "plain": _step(copy.deepcopy(model), x),
        "terrazzo": _step(_sharded(copy.deepcopy(model), fully_shard, mesh=mesh), x),
        "torch": _step(_sharded(copy.deepcopy(model), torch_fully_shard, mesh=mesh), x),
        "ddp": _step(DistributedDataParallel(copy.deepcopy(model)), x),
    }


def _steps(name: str, doc: str, world: int, sizes: tuple[int, int, int], limits: dict[str, float], n: int = 21) -> None:
    """A case against each of those with whom the design compares."""
    for other, limit in limits.items():

        def compare(setting: Setting) -> Implementations:
            return _compare(setting, *sizes)

        compare.__doc__ = doc
        full = name if other == "torch" else f"{name}_beside_{other}"
        runs_on: RunsOn = "both" if other == "torch" else "cpu"  # without budgets the others are the same
        case(world=world, budget=Budget("time", limit, other), repetitions=n, name=full, runs_on=runs_on)(compare)


_steps(
    "narrow_alone",
    "Width 64, 24 blocks, batch 8: what the library costs when there is nobody to talk to.",
    1,
    (64, 24, 8),
    {"torch": 0.45, "ddp": 1.15},
)
_steps("narrow", "The same on two ranks: latency counts.", 2, (64, 24, 8), {"torch": 0.3, "ddp": 1.7})
# 0.6, because DDP, which gathers nothing, takes 0.5 here: docs/fully-shard.md.
_steps("wide", "Width 512, 6 blocks, batch 64: bytes count.", 2, (512, 6, 64), {"torch": 0.6, "ddp": 1.15}, 11)


@case(world=2, repetitions=11, runs_on="accelerator")
def wide_bfloat16(setting: Setting) -> Implementations:
    """Width 2048, 8 blocks, batch 4096 in bfloat16: 268 million parameters, what accelerators are for."""
    torch.manual_seed(0)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    width, blocks, batch = (64, 2, 8) if setting.quick else (2048, 8, 4096)
    model, x = Model(width, blocks).to(setting.device), torch.randn(batch, width).to(setting.device)
    ours = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    theirs = TorchMixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return {
        "terrazzo": _step(_sharded(copy.deepcopy(model), fully_shard, mesh=mesh, mp_policy=ours), x),
        "torch": _step(_sharded(copy.deepcopy(model), torch_fully_shard, mesh=mesh, mp_policy=theirs), x),
    }


def _layers(setting: Setting) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(64, 4 if setting.quick else 100).to(setting.device), torch.randn(8, 64).to(setting.device)


@case(budget=Budget("time", 1.03, "quiet"), repetitions=101)  # two of them differ by more than that
def setters(setting: Setting) -> Implementations:
    """Forward and backward of 100 layers, with the setters of a loop that accumulates gradients before each of both."""
    model, x = _layers(setting)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    sharded: Any = _sharded(model, fully_shard, mesh=mesh)

    def turn() -> None:
        sharded.set_requires_gradient_sync(True)
        sharded.set_reshard_after_backward(True)
        sharded.set_is_last_backward(True)

    def with_setters() -> None:
        turn()
        loss = sharded(x).square().mean()
        turn()
        loss.backward()

    return {"terrazzo": with_setters, "quiet": lambda: sharded(x).square().mean().backward()}


@case(budget=Budget("time", 1.05, "loop"))
def micro_batch(setting: Setting) -> Implementations:
    """A micro-batch of the engine in stage 3, 100 layers, beside a plain loop with fully_shard."""
    model, x = _layers(setting)
    mesh, many = init_device_mesh(setting.device.type, (setting.world,)), 1 << 20
    plain: Any = _sharded(copy.deepcopy(model), fully_shard, mesh=mesh)
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "gradient_accumulation_steps": many,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
    }
    engine = initialize(model, config=config)

    def of_engine() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    def of_loop() -> None:
        plain.set_is_last_backward(True)
        (plain(x).square().mean() / many).backward()

    return {"terrazzo": of_engine, "loop": of_loop}


def _grown(width: int) -> None:
    def compare(setting: Setting) -> Implementations:
        return {
            "terrazzo": lambda: growth("terrazzo", width, 8, 4096),
            "torch": lambda: growth("torch", width, 8, 4096),
        }

    compare.__doc__ = f"""Host time of a step at 4096 simulated ranks over that at 8, two layers of width {width}."""
    case(unit="times", repetitions=1, budget=Budget("value", 2), name=f"growth_{width}")(compare)


_grown(4096)
_grown(4097)
