"""What the examples of clusters train: a small model of random numbers, by the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from terrazzo.engine import Engine, initialize

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "seed": 3,
}


def make_model() -> nn.Module:
    """Two layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_data() -> TensorDataset:
    """Random numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))


def make_engine() -> Engine:
    """The model and its data, on all ranks of the process group."""
    return initialize(make_model(), training_data=make_data(), config=CONFIG)


def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> float:
    """One step; its loss over all ranks."""
    x, y = batch
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean.item() / torch.distributed.get_world_size()
