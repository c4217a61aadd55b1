"""A run of which the test kills ranks, at any moment: `entry = "killed:main"`, copied beside the run's file."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from terrazzo.engine import initialize


def main(run: Any, steps: str) -> None:
    folder = Path(run.path).parent / "ranks"
    (folder / f"{os.getpid()}-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):  # checkpoints have the state of each
        seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
    engine = initialize(model, training_data=data, config=run.engine)
    with run.manager() as manager:
        engine.load_step(manager)
        for x, y in engine.training_dataloader:
            if engine.global_steps >= int(steps):
                break
            engine.backward((engine(x) - y).square().mean())
            engine.step()
            time.sleep(0.05)
            engine.save_step(manager)
    dist.destroy_process_group()
