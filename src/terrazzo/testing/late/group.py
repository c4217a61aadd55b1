"""The default process group of ranks that have the device."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from terrazzo._torch import groups
from terrazzo.testing.late.starting import init


def init_process_group(timeout: timedelta = timedelta(minutes=5), device_id: torch.device | None = None) -> None:
    """Initialize the default group for this device and the CPU, on a rank of `terrazzo.testing` or torchrun.

    A default group that exists already, as ranks of `terrazzo.testing` have, is destroyed first.

    Args:
        timeout: After this time a collective fails, and with it the group.
        device_id: Bind the group to this device, as programs do with NCCL. Then new groups are splits of this one, so
            all ranks have to call `torch.distributed.new_group`.
    """
    init()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "cpu:gloo,late:late",
        store=dist.PrefixStore(f"late {store.add(f'late groups of {rank}', 1)}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device_id,
    )
    if device_id is not None:
        # Splits of a gloo group read its ranks here. torch has them only in the process's first gloo group.
        groups.backend_of(groups.default_group(), torch.device("cpu")).options.global_ranks_in_group = list(
            range(world)
        )
