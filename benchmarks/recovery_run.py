"""A run that loses a rank once, and says when it reaches which point of going on: `bench_recovery` starts it.

    terrazzo train run.toml                                    which names this script, `terrazzo` and a folder
    torchrun ... benchmarks/recovery_run.py run.toml torch FOLDER

Both train the same model on the same data, sharded over the ranks, save after the first step, and lose a rank in the
second: by terrazzo's engine and manager, or by `fully_shard` and `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS = 8
SETTLES = 20  # seconds before the fault, in which `terrazzo train` has its spare process import what the ranks have


def say(folder: Path, what: str, at: float | None = None) -> None:
    """Write down when this rank was there."""
    line = json.dumps({"what": what, "at": time.time() if at is None else at, "start": START, "rank": RANK})
    with (folder / "points").open("a") as file:
        file.write(line + "\n")


def process_began() -> float:
    """When this process was started, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def die_once(folder: Path, step: int) -> None:
    """In the second step, the last rank is killed; the first time."""
    if step == 2 and RANK == dist.get_world_size() - 1 and not (folder / "died").exists():
        time.sleep(SETTLES)
        (folder / "died").touch()
        say(folder, "fault")
        os.kill(os.getpid(), signal.SIGKILL)


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))


def batch_of(width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1))


def train_terrazzo(run_file: str, folder: Path, width: int) -> None:
    from terrazzo.checkpoint import DefaultLoadPlanner, LoadPlan
    from terrazzo.engine import initialize
    from terrazzo.launch import read_run

    finish = DefaultLoadPlanner.finish_plan

    def finish_plan(self: Any, plan: LoadPlan) -> LoadPlan:
        say(folder, "planned")
        return finish(self, plan)

    DefaultLoadPlanner.finish_plan = finish_plan  # type: ignore[assignment]
    run = read_run(run_file)
    engine = initialize(model_of(width), config=run.engine)
    batch = batch_of(width)
    with run.manager(async_op=False) as manager:
        say(folder, "loading")
        engine.load_step(manager)
        say(folder, "read")
        while engine.global_steps < 3:
            die_once(folder, engine.global_steps + 1)
            engine.backward(engine(batch).square().mean())
            engine.step()
            say(folder, "stepped")
            engine.save_step(manager)
    dist.destroy_process_group()


def train_torch(folder: Path, width: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            say(folder, "planned")
            return super().finish_plan(new_plan)

    dist.init_process_group("gloo")
    model = model_of(width)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = batch_of(width)
    say(folder, "loading")
    step, latest = 0, folder / "latest"
    if latest.exists():
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=folder / latest.read_text(), planner=Planner())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = state["step"]
    say(folder, "read")
    while step < 3:
        step += 1
        die_once(folder, step)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        say(folder, "stepped")
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step{step}")
        if RANK == 0:
            latest.write_text(f"step{step}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK, START = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _, given_run, whose, given_folder, given_width = sys.argv
    say(Path(given_folder), "began", process_began())
    if whose == "terrazzo":
        train_terrazzo(given_run, Path(given_folder), int(given_width))
    else:
        train_torch(Path(given_folder), int(given_width))
