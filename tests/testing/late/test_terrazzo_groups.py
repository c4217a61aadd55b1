"""Process groups that their members alone make, where the default group is bound to a device.

There torch makes a group by a split of the default one, which waits until all its ranks do the same.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from late_ranks import skip_without_late
from ranks import fresh_values
from terrazzo._torch.groups import without_groups
from terrazzo.comm import axis_of, axis_over, collectives
from terrazzo.engine.tied import TiedParameters
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.testing import late

pytestmark = pytest.mark.long


def check_axes(device, rank):
    """Threads make groups in an order that ranks do not share."""
    if rank < 3:
        sums = {}

        def add(ranks):
            sums[ranks] = collectives.all_reduce(torch.ones(1, device=device), axis_over(ranks, "late")).item()

        threads = [threading.Thread(target=add, args=(pair,)) for pair in ((0, 1), (2, 0), (1, 2)) if rank in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(sums.values()) == [2, 2]
    mesh = init_device_mesh("late", (5,))
    assert collectives.all_reduce(torch.ones(1, device=device), axis_of(mesh, 0)).item() == 5


def check_several_dims(device, rank):
    mesh = without_groups("late", torch.tensor([[[0, 1], [2, 3]]]))
    if rank < 4:
        axis = axis_of(mesh, (2, 1))
        assert axis.ranks == (0, 2, 1, 3)
        x = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0), Shard(0)])
        assert x.full_tensor().tolist() == list(range(8))
        assert collectives.all_reduce(torch.ones(1, device=device), axis).item() == 4


def check_tied(device, rank):
    stage = nn.Linear(2, 2, bias=False).to(device)
    nn.init.constant_(stage.weight, rank)
    module = nn.ModuleDict({{0: "embed", 4: "head"}.get(rank, f"block {rank}"): stage})
    tied = TiedParameters(module, {"head.weight": "embed.weight"}, axis_of(init_device_mesh("late", (5,)), 0))
    tied.make_equal(module)
    assert stage.weight.unique().tolist() == [rank % 4]


def check_other_meshes(device, rank):
    source, target = (without_groups("late", torch.tensor(ranks)) for ranks in ([0, 1, 2], [3, 1]))
    if rank < 4:
        x = distribute_tensor(torch.arange(6.0), source, [Shard(0)])
        y = x.redistribute(target, [Replicate()])
        assert rank not in (1, 3) or y.to_local().tolist() == list(range(6))


def check_sharding(device, rank):
    """Of the first stage, on four of five ranks; on the CPU the ranks compare their steps in a group of their own."""
    for kind in ("late", "cpu"):
        mesh = without_groups(kind, torch.arange(4))
        if rank == 4:
            continue
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(kind)
        model.load_state_dict(plain.state_dict())
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        model.set_separate_reduce_scatter_group()
        for x in torch.ones(2, 3, 4):
            model(x.to(kind)).sum().backward()
            plain(x).sum().backward()
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(own.grad, DTensor)
            torch.testing.assert_close(own.grad.full_tensor().cpu(), expected.grad)


def check_dims_of_a_mesh(device, rank):
    """PyTorch makes their groups, by splits where the default group is bound."""
    mesh = init_device_mesh("late", (5, 1), mesh_dim_names=("a", "b"))
    assert mesh.get_group("b").bound_device_id == dist.group.WORLD.bound_device_id
    assert collectives.all_reduce(torch.ones(1, device=device), axis_of(mesh, (0, 1))).item() == 5


CHECKS = (check_axes, check_several_dims, check_tied, check_other_meshes, check_sharding, check_dims_of_a_mesh)


def check_all(bound):
    late.init(devices=5)
    rank = int(os.environ["RANK"])
    device = torch.device("late", rank)
    torch.accelerator.set_device_index(rank)
    late.init_process_group(timeout=timedelta(seconds=20), device_id=device if bound else None)
    with late.checked():
        for check in CHECKS:
            check(device, rank)
            dist.barrier()
    group = dist.new_group([0, 1])  # other groups are splits as before
    assert rank > 1 or dist.get_process_group_ranks(group) == [0, 1]


@pytest.mark.parametrize("bound", [False, True])
def test_their_ranks_alone_make_groups(bound):
    skip_without_late()
    fresh_values(5, check_all, bound, timeout=120)
