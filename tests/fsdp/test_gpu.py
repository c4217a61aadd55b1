"""What a step of fully_shard takes on accelerators. That it trains as one device is in `testing/late`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from device_ranks import run_on_devices
from terrazzo.fsdp import fully_shard, report
from terrazzo.tensor import init_device_mesh


def check_memory(device: torch.device) -> None:
    mesh, accelerator = init_device_mesh(device.type, (dist.get_world_size(),)), torch.accelerator
    width, depth = 2048, 6
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    x = torch.randn(1, width, device=device)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    accelerator.synchronize()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    model(x).sum().backward()
    accelerator.synchronize()
    peak = accelerator.max_memory_allocated() - before
    gradients = sum(p.grad.to_local().nbytes for p in model.parameters())
    group = width * width * 4
    assert peak - gradients <= 4 * group + group // 4, "two whole groups, gradients, and one reduce buffer under way"
    assert report(model).held == 2 * gradients


@pytest.mark.gpu
def test_memory_of_a_step():
    run_on_devices(check_memory)
