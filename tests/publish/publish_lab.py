"""Kills ranks of a publisher or of a receiver: a program, so that ranks are forked from a process without threads.

    python publish_lab.py FOLDER EVERY

Some versions are in FOLDER/before.  Two ranks publish one more, or receive the newest, of which one is killed at one
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

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from crash_lab import MANY, RAISED, SUCCEEDED, fork_ranks
from faults import FaultySystem

from terrazzo.checkpoint.stores import LocalStore
from terrazzo.comm import link
from terrazzo.errors import TerrazzoError
from terrazzo.publish import Publisher, Receiver
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

SETTINGS = {"anchor_every": 3, "keep": 1}
LIMIT = timedelta(seconds=20)


def numbers(version: int) -> dict[str, torch.Tensor]:
    """What a version has: a little of it changes each time."""
    found = {"w": torch.arange(2400, dtype=torch.float32).view(60, 40), "b": torch.ones(7)}
    for each in range(version + 1):
        found["w"][each % 60, 3] += 1 + each
        found["b"][each % 7] -= each
    return found


def spread(state: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """The same on two ranks, one tensor of it sharded."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "w": distribute_tensor(state["w"], mesh, [Shard(dim)]),
        "b": distribute_tensor(state["b"], mesh, [Replicate()]),
    }


def take_part(rank: int, path: Path, role: str, victim: int, at: int) -> None:
    """One rank of a publisher or a receiver; ends the process."""
    link._REPORTS_SECONDS = 0.2  # on one machine, who is alive answers at once
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    system = FaultySystem(at if rank == victim else MANY, "kill")
    store = LocalStore(path, system)
    try:
        if role == "receive":
            state = spread(numbers(-1), 1)
            receiver = Receiver(store, state, timeout=LIMIT)
            receiver.poll()
            receiver.apply()
            receiver.close()
        else:
            state = spread(numbers(-1), 0)
            with Publisher(store, state, timeout=LIMIT, **SETTINGS) as publisher:
                for version in (5, 6):
                    for name, value in spread(numbers(version), 0).items():
                        state[name].to_local().copy_(value.to_local())
                    publisher.publish(version)
    except TerrazzoError:
        os._exit(RAISED)
    Path(f"{path}.count{rank}").write_text(str(system.count))
    os._exit(SUCCEEDED)


def trial(folder: Path, name: str, role: str, victim: int, at: int) -> list[int]:
    """One publication or reception with one death, and how each rank ended."""
    path = folder / name
    shutil.copytree(folder / "before", path, symlinks=True)
    return fork_ranks(lambda rank: take_part(rank, path, role, victim, at))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    for role in ("publish", "receive"):
        trial(folder, f"{role}-count", role, -1, MANY)
        for victim in range(2):
            count = int((folder / f"{role}-count.count{victim}").read_text())
            for at in range(victim, count, every):
                name = f"{role}-{victim}-{at}"
                ends = trial(folder, name, role, victim, at)
                print(json.dumps({"name": name, "role": role, "victim": victim, "ends": ends}), flush=True)
