"""PyTorch's FSDP2, which is known to order its streams: no race is reported, and all schedules give the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from late_ranks import run_late
from terrazzo.testing import late

pytestmark = pytest.mark.long


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(device, micro_batches=1, sizes=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), *(Block() for _ in range(3)), nn.Linear(16, 20)).to(device)
    names = {"mesh_dim_names": ("replicas", "shards")} if sizes else {}
    mesh = init_device_mesh("late", sizes or (torch.distributed.get_world_size(),), **names)
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            tokens = torch.randint(20, (3, 5), generator=generator).pin_memory().to(device, non_blocking=True)
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).cpu()


def check_sharded(device):
    return trained(device)


def check_mixed_precision(device):
    return trained(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def check_accumulation(device):
    return trained(device, micro_batches=2)


def check_hsdp(device):
    return trained(device, sizes=(2, 2))


def all_same(results):
    """All modes and ranks have the same bits, of which none is what new memory has."""
    first = results[0][0]
    assert not first.isnan().any()
    assert all(torch.equal(value, first) for values in results for value in values)


def test_fsdp2_has_no_races():
    modes = late.MODES
    results = run_late(2, check_sharded, check_mixed_precision, check_accumulation, modes=modes)
    for k in range(3):
        all_same(results[k * len(modes) : (k + 1) * len(modes)])


def test_fsdp2_has_no_races_with_replicas():
    all_same(run_late(4, check_hsdp, modes=late.MODES))
