"""Processes of which one was in process groups before, which are destroyed, meet in a new one."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.checkpoint as checkpoint
from fsdp.test_watch import TOLD, known_branches, own_branch, step
from ranks import fresh_values
from terrazzo.comm.axis import axis_beside, axis_over
from terrazzo.comm.comparison import Comparison
from terrazzo.errors import DivergedRanksError
from terrazzo.fsdp import fully_shard


def join(name: str, rank: int, store: dist.Store) -> None:
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )


def use_all(folder: str) -> None:
    """What takes names or keys of its own: groups, a sharded model, saves, and the two comparisons between ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    beside = axis_beside(axis_over((0, 1), "cpu"))
    found = torch.tensor([rank + 1.0])
    assert beside.group is not None and beside.group is not dist.group.WORLD
    beside.group.allreduce([found]).wait()
    assert found.item() == 3

    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = copy.deepcopy(expected)
    for each in (*model, model):
        fully_shard(each)
    x = torch.arange(12.0).reshape(4, 3)
    expected(x).square().mean().backward()
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    with pytest.raises(DivergedRanksError, match=TOLD):
        step(*known_branches(), own_branch())

    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    checkpoint.load(model.state_dict(), checkpoint_id=folder)

    compared = Comparison.among((0, 1), "numbers")
    differences = []
    for value in (7, rank):
        differences.append(compared.start(value).result())
        dist.barrier()
    differences.append(compared.start(7).result())
    assert differences[0] is None and any(differences[1:])


def two_ages(folder: str) -> None:
    """Process 1 ends after the first groups; process 2 comes in its place."""
    process = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.destroy_process_group()
    if process < 2:
        for age in range(2):
            join(f"before {age}", process, store)
            use_all(f"{folder}/{age}")
            dist.destroy_process_group()
    if process != 1:
        join("after", process // 2, store)
        use_all(f"{folder}/after")


def test_processes_of_two_ages(tmp_path: Path):
    fresh_values(3, two_ages, str(tmp_path), timeout=100)
