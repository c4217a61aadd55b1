"""A run that goes on until it is told to end: `entry = "stopped:main"`, copied beside the run's file by the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from terrazzo.engine import initialize
from terrazzo.launch import StopSignal


def main(run: Any, further: str) -> None:
    """Without a checkpoint, as long as it may; with one, so many further steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
    engine = initialize(model, training_data=data, config=run.engine)
    path, _ = engine.load_checkpoint(run.checkpoints)
    last = None if path is None else engine.global_steps + int(further)
    with StopSignal() as stop:
        for x, y in engine.training_dataloader:
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                with (Path(run.path).parent / "losses.jsonl").open("a") as file:
                    file.write(json.dumps([engine.global_steps, mean.item() / dist.get_world_size()]) + "\n")
            if stop.agreed():
                engine.save_checkpoint(run.checkpoints)
                stop.leave()
            if engine.global_steps == last:
                break
    dist.destroy_process_group()
