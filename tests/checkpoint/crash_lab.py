"""Kills ranks of saves: a program, so that each save's ranks are forked from a process that has torch and no threads.

    python crash_lab.py OLD FOLDER

For each rank and each file operation of its save: copies the checkpoint OLD to FOLDER/<rank>-<operation>, overwrites
it with two ranks, of which one is killed at that operation, and prints a line of JSON that says how the two ended.
Without OLD (-), nothing is there before the save.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from faults import FaultySystem, FaultyWriter

from terrazzo.checkpoint import ChunkStorageMetadata, save
from terrazzo.comm import link
from terrazzo.errors import TerrazzoError

MANY = 10_000
RAISED, SUCCEEDED, HUNG = 7, 0, 99


def save_as(rank: int, path: Path, victim: int, at: int) -> None:
    """One rank of a save; ends the process."""
    link._REPORTS_SECONDS = 0.2  # on one machine, who is alive answers at once
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    system = FaultySystem(at if rank == victim else MANY, "kill")
    state = {"half": PerHalf(rank), "replicated": torch.full((10,), 2.0), "object": 2}
    try:
        save(state, storage_writer=FaultyWriter(path, system), timeout=timedelta(seconds=20))
    except TerrazzoError:
        os._exit(RAISED)
    Path(f"{path}.count{rank}").write_text(str(system.count))
    os._exit(SUCCEEDED)


class PerHalf:
    """A tensor of which each rank holds a half."""

    dtype = torch.float32

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self) -> torch.Size:
        return torch.Size([6, 4])

    def __create_chunk_list__(self) -> list:
        return [ChunkStorageMetadata(torch.Size([3 * self.rank, 0]), torch.Size([3, 4]))]

    def to_local(self) -> torch.Tensor:
        return torch.full((3, 4), 2.0)


def trial(old: str, path: Path, victim: int, at: int) -> list[int]:
    """One save with one death; how each rank ended: its exit status, minus the signal that killed it, 99 if it hung."""
    if old != "-":
        shutil.copytree(old, path)
    return fork_ranks(lambda rank: save_as(rank, path, victim, at))


def fork_ranks(run: Callable[[int], None]) -> list[int]:
    """How two processes end that `run` as ranks 0 and 1: exit status, minus the signal of a kill, 99 if one hung."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                run(rank)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    deadline = time.monotonic() + 30
    return [_end_of(child, deadline) for child in children]


def _end_of(child: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


if __name__ == "__main__":
    torch.set_num_threads(1)
    old, folder = sys.argv[1], Path(sys.argv[2])
    trial(old, folder / "count", -1, MANY)
    for victim in range(2):
        for at in range(int(Path(f"{folder}/count.count{victim}").read_text())):
            path = folder / f"{victim}-{at}"
            print(json.dumps({"path": str(path), "victim": victim, "ends": trial(old, path, victim, at)}), flush=True)
