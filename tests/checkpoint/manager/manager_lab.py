"""Kills ranks of a manager's saves and removals: a program, so that ranks are forked from a process without threads.

    python manager_lab.py FOLDER EVERY

Steps 1 and 2 of a run are whole, and a manager that keeps two saves step 3, on two ranks, of which one is killed at one
file operation: at every EVERY-th, of either rank.  Prints a line of JSON for each, which says how the two ended.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from crash_lab import MANY, RAISED, SUCCEEDED, fork_ranks
from faults import FaultySystem

from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.comm import link
from terrazzo.errors import TerrazzoError

KEEP = 2


def state(step: int) -> dict:
    """What is saved of a step; each value says which."""
    return {"w": torch.full((6, 4), float(step)), "b": torch.full((10,), float(step)), "step": step}


def save_as(rank: int, path: Path, victim: int, at: int) -> None:
    """One rank of a save; ends the process."""
    link._ROLL_CALL_SECONDS = 0.2  # on one machine, who is alive answers at once
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    system = FaultySystem(at if rank == victim else MANY, "kill")
    try:
        manager = CheckpointManager(LocalStore(path, system), keep=KEEP, timeout=timedelta(seconds=20))
        manager.save(3, state(3), {"loss": 3.0})
        manager.close()
    except TerrazzoError:
        os._exit(RAISED)
    Path(f"{path}.count{rank}").write_text(str(system.count))
    os._exit(SUCCEEDED)


def trial(folder: Path, name: str, victim: int, at: int) -> list[int]:
    """One save with one death, and how each rank ended."""
    path = folder / name
    shutil.copytree(folder / "before", path)
    return fork_ranks(lambda rank: save_as(rank, path, victim, at))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    trial(folder, "count", -1, MANY)
    for victim in range(2):
        for at in range(victim, int((folder / f"count.count{victim}").read_text()), every):
            ends = trial(folder, f"{victim}-{at}", victim, at)
            print(json.dumps({"name": f"{victim}-{at}", "victim": victim, "ends": ends}), flush=True)
