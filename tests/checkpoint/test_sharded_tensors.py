"""PyTorch's older ShardedTensors, also with several shards on a rank, are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor

from ranks import run_ranks
from terrazzo.checkpoint import load, save

WHOLE = torch.arange(24.0).reshape(8, 3)


def sharded(whole: torch.Tensor, rows: int) -> Any:
    """Shards of so many rows, dealt to the ranks in turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [
        sharded_tensor.Shard.from_tensor_and_offsets(whole[at : at + rows].clone(), [at, 0], rank)
        for number, at in enumerate(range(0, len(whole), rows))
        if number % world == rank
    ]
    return sharded_tensor.init_from_local_shards(shards, *whole.shape)


def check(folder: Path) -> None:
    save({"w": sharded(WHOLE, 2)}, checkpoint_id=folder)
    for rows in (1, 4):
        target = sharded(torch.zeros(8, 3), rows)
        load({"w": target}, checkpoint_id=folder)
        for shard in target.local_shards():
            first = shard.metadata.shard_offsets[0]
            torch.testing.assert_close(shard.tensor, WHOLE[first : first + rows], rtol=0, atol=0)
    plain = torch.zeros(8, 3)
    load({"w": plain}, checkpoint_id=folder)
    torch.testing.assert_close(plain, WHOLE, rtol=0, atol=0)


def test_several_shards_of_a_rank(tmp_path):
    run_ranks(2, check, tmp_path)
