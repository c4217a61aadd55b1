"""On an accelerator: streams, page-locked offloading and memory, on one device and, where there are several, over
NCCL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp.compare import Model, adamw, batches
from ranks import run_fresh
from terrazzo.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, report
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.gpu


def use_nccl() -> Any:
    """The mesh of all ranks, each with a device of its own."""
    torch.cuda.set_device(dist.get_rank())
    dist.destroy_process_group()
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return init_device_mesh("cuda", (dist.get_world_size(),))


def check_training() -> None:
    mesh = use_nccl()
    rank, world = dist.get_rank(), dist.get_world_size()
    for policy, offload in (
        (MixedPrecisionPolicy(), None),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), None),
        (MixedPrecisionPolicy(), CPUOffloadPolicy()),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), CPUOffloadPolicy(pin_memory=False)),
    ):
        torch.manual_seed(0)
        model = Model(4, 64, 256)
        reference = copy.deepcopy(model).cuda()
        options = {} if offload is None else {"offload_policy": offload}
        for block in model.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype), **options
            )
        fully_shard(model, mesh=mesh, mp_policy=policy, **options)
        assert all(p.device.type == ("cuda" if offload is None else "cpu") for p in model.parameters())
        ours, theirs = adamw(model), adamw(reference)
        for x, y in batches(10):
            x, y = x.cuda(), y.cuda()
            part = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
            ((model(x[part]) - y[part]) ** 2).mean().backward()
            ((reference(x) - y) ** 2).mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        tolerance = 1e-4 if policy.param_dtype is None else 0.1
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            local = a.to_local().to("cuda")
            box = a._layout.box()
            torch.testing.assert_close(local, b.detach()[box.slices()], rtol=tolerance, atol=tolerance)
            pinned = offload is not None and offload.pin_memory and a.to_local().numel() > 0
            assert a.to_local().is_pinned() == pinned


def check_memory() -> None:
    mesh = use_nccl()
    width, depth = 2048, 6
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.to("cuda")
    x = torch.randn(1, width, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = sum(p.grad.to_local().nbytes for p in model.parameters())
    group = width * width * 4
    assert peak - gradients <= 4 * group + group // 4, "two whole groups, gradients, and one reduce buffer under way"
    assert report(model).held == 2 * gradients


@pytest.mark.parametrize("check", [check_training, check_memory])
def test_every_device(check):
    for outcome in run_fresh(torch.cuda.device_count(), check, timeout=180):
        assert outcome.ok, outcome


@pytest.mark.parametrize("check", [check_training, check_memory])
def test_one_device(check):
    (outcome,) = run_fresh(1, check, timeout=180)
    assert outcome.ok, outcome
