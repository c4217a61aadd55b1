"""A run that loses a rank, once or for good: `entry = "crashing:main"`, copied beside the run's file by the test."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from terrazzo.engine import initialize


def main(run: Any, steps: str, crash_at: str, lost: str = "") -> None:
    if (Path(run.path).parent / "crashed").exists() and lost == os.environ["RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)  # before it connects to any other
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
    engine = initialize(model, training_data=data, config=run.engine)
    engine.load_checkpoint(run.checkpoints)
    print(f"from step {engine.global_steps}", flush=True)
    folder = Path(run.path).parent
    for x, y in engine.training_dataloader:
        if engine.global_steps == int(steps):
            break
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([engine.global_steps, mean.item() / dist.get_world_size()]) + "\n")
        if engine.global_steps == int(crash_at) and dist.get_rank() == dist.get_world_size() - 1:
            if not (folder / "crashed").exists():
                (folder / "crashed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        engine.save_checkpoint(run.checkpoints)
    dist.destroy_process_group()
