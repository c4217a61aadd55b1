"""PyTorch's `replicate` around modules that are sharded: it leaves these alone, and all train as one process would."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate

from ranks import device_type, run_ranks
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.experimental import implicit_replication

pytestmark = pytest.mark.on_late


def check() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    reference = copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), (2,))
    fully_shard([model[2][0], model[2][2]], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model[2])
    replicate(model)
    rank = torch.distributed.get_rank()
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        model(x.chunk(2)[rank]).square().mean().backward()
        reference(x).square().mean().backward()
        with implicit_replication():
            ours.step()
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    assert not isinstance(model[0].weight, DTensor) and isinstance(model[2][0].weight, DTensor)
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-5)


def test_replicate_around_fully_shard():
    run_ranks(2, check)
