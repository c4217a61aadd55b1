"""The host's time for a step of one rank of a job of thousands, in a process of its own with the process group `fake`.

    python -m benchmarks.fsdp_scale terrazzo 4097 8 4096

prints how many times the seconds of a step among the first number of ranks it takes among the second.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from terrazzo.fsdp import fully_shard

SAMPLES = 21


def growth(whose: str, width: int, few: int, many: int) -> float:
    """How a step of two linear layers, from 16 to `width` and back, grows from `few` ranks to `many`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fsdp_scale", whose, str(width), str(few), str(many)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        cwd=Path(__file__).parent.parent,
    )
    return float(done.stdout)


def simulated_step(
    function: Callable[..., object], width: int, ranks: int, rank: int = 0
) -> tuple[nn.Module, Callable[[], None]]:
    """Two linear layers that `function` has sharded over ranks that are not there, and a step of them on `rank`.

    The first rank has a row of everything: the group's own work is to copy what this rank has to the places of all.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16))
    for layer in model:
        function(layer, mesh=mesh)
    function(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 16)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _seconds(step: Callable[[], None]) -> float:
    samples = []
    for i in range(SAMPLES + 3):
        start = time.perf_counter()
        step()
        if i >= 3:
            samples.append(time.perf_counter() - start)
    return median(samples)


def main(whose: str, width: int, few: int, many: int) -> None:
    """Prints the ratio."""
    function: Any = fully_shard if whose == "terrazzo" else torch_fully_shard
    seconds = [_seconds(simulated_step(function, width, ranks)[1]) for ranks in (few, many)]
    print(seconds[1] / seconds[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
