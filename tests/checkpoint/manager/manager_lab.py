"""Kills ranks of a manager's saves and removals: a program, so that ranks are forked from a process without threads.

    python manager_lab.py FOLDER EVERY PLACES

Steps 1 and 2 of a run are whole, and a manager that keeps two saves step 3, on two ranks, of which one is killed at one
file operation: at every EVERY-th, of either rank.  Prints a line of JSON for each, which says how the two ended.
Beside the steps are one of a later release, and one that is a link to a checkpoint elsewhere.

PLACES is `one`, or `tiers`: then each rank is a host with a folder of its own, and what is saved there is copied to the
run's.
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
from newer import add_foreign

from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.comm import link
from terrazzo.errors import TerrazzoError

KEEP = 2


def state(step: int) -> dict:
    """What is saved of a step; each value says which."""
    return {"w": torch.full((6, 4), float(step)), "b": torch.full((10,), float(step)), "step": step}


def manager_of(path: Path, rank: int, system: FaultySystem, tiers: bool) -> CheckpointManager:
    """The manager of one rank."""
    limit = timedelta(seconds=20)
    if not tiers:
        return CheckpointManager(LocalStore(path, system), keep=KEEP, timeout=limit)
    local = LocalStore(path / f"host{rank}", system)
    return CheckpointManager(LocalStore(path / "root", system), keep=KEEP, local=local, keep_local=1, timeout=limit)


def save_as(rank: int, path: Path, victim: int, at: int, tiers: bool, steps: tuple[int, ...] = (3,)) -> None:
    """One rank of a save; ends the process."""
    link._REPORTS_SECONDS = 0.2  # on one machine, who is alive answers at once
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    system = FaultySystem(at if rank == victim else MANY, "kill")
    try:
        manager = manager_of(path, rank, system, tiers)
        if manager.steps():
            manager.restore("latest", state(-1))
        for step in steps:
            manager.save(step, state(step), {"loss": float(step)})
        manager.close()
    except TerrazzoError:
        os._exit(RAISED)
    Path(f"{path}.count{rank}").write_text(str(system.count))
    os._exit(SUCCEEDED)


def trial(folder: Path, name: str, victim: int, at: int, tiers: bool) -> list[int]:
    """One save with one death, and how each rank ended."""
    path = folder / name
    shutil.copytree(folder / "before", path, symlinks=True)
    return fork_ranks(lambda rank: save_as(rank, path, victim, at, tiers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, every, tiers = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "tiers"
    before = folder / "before"
    assert fork_ranks(lambda rank: save_as(rank, before, -1, MANY, tiers, (1, 2))) == [SUCCEEDED] * 2
    root = before / "root" if tiers else before
    add_foreign(root, root / "global_step1", folder / "shared")
    assert trial(folder, "count", -1, MANY, tiers) == [SUCCEEDED] * 2
    for victim in range(2):
        for at in range(victim, int((folder / f"count.count{victim}").read_text()), every):
            ends = trial(folder, f"{victim}-{at}", victim, at, tiers)
            print(json.dumps({"name": f"{victim}-{at}", "victim": victim, "ends": ends}), flush=True)
