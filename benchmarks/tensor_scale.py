"""One rank of a job of thousands, in a process of its own with PyTorch's process group `fake`.

    python -m benchmarks.tensor_scale missed_plan 4096

prints the median of the seconds that the work of that name takes this rank's host.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from terrazzo.layout import Layout
from terrazzo.tensor import DTensor, Replicate, Shard
from terrazzo.tensor.cross_mesh import plan_transfer
from terrazzo.tensor.dispatch.keys import routes

SAMPLES = 101


def seconds_at_scale(work: str, ranks: int) -> float:
    """What `work` takes one of `ranks` ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tensor_scale", work, str(ranks)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
    )
    return float(done.stdout)


def missed_plan(ranks: int) -> Callable[[], object]:
    """A product whose plan is not there yet, of rows that do not divide among the ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    # The last rank has one row where the others have two.
    x = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], shape=(2 * ranks - 1, 8), stride=(8, 1))
    w = DTensor.from_local(torch.ones(8, 8), mesh, [Replicate()])

    def run() -> None:
        routes.clear()
        x @ w

    return run


def redistribution(ranks: int) -> Callable[[], object]:
    """From one sharded dim to the other, once its plan is there."""
    mesh = init_device_mesh("cpu", (ranks,))
    x = DTensor.from_local(torch.ones(1, ranks), mesh, [Shard(0)])
    return lambda: x.redistribute(placements=[Shard(1)])


def transfer_plan(ranks: int) -> Callable[[], object]:
    """To a square mesh half of whose ranks are others, where each rank meets all of the old ones."""
    side = int(ranks**0.5)
    line = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
    square = DeviceMesh("cpu", (torch.arange(side * side) + ranks // 2).reshape(side, side), _init_backend=False)
    src = Layout.of(line, [Shard(0)], (2 * ranks, 2 * ranks))
    dst = Layout.of(square, [Shard(1), Shard(1)], (2 * ranks, 2 * ranks))

    def run() -> None:
        plan_transfer.cache_clear()
        plan_transfer(src, dst, dist.get_rank())

    return run


def main(work: str, ranks: int) -> None:
    """Prints the median of the seconds."""
    world = 2 * ranks if work == "transfer_plan" else ranks
    dist.init_process_group("fake", rank=ranks // 2 + 1, world_size=world, store=FakeStore())
    run = {"missed_plan": missed_plan, "redistribution": redistribution, "transfer_plan": transfer_plan}[work](ranks)
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    print(median(samples))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
