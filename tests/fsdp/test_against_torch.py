"""Beside torch's own fully_shard, with the same arguments and the same data: the same losses and parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo.fsdp as our_fsdp
from fsdp.compare import Model, batches, mine
from ranks import device_type, run_ranks

pytestmark = pytest.mark.on_late(both=True)


def program(fsdp: Any, model: Model, steps: int, accumulate: int, mesh: Any, precision: dict[str, Any]) -> list[Any]:
    """A program that uses `fully_shard`: only where it imports from differs."""
    options = {"mesh": mesh, "mp_policy": fsdp.MixedPrecisionPolicy(**precision)}
    for block in model.blocks:
        fsdp.fully_shard(block, reshard_after_forward=True, **options)
    fsdp.fully_shard(model, **options)
    assert isinstance(model, fsdp.FSDPModule)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: list[Any] = []
    for step, (x, y) in enumerate(batches(steps)):
        last = step % accumulate == accumulate - 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        loss = ((model(mine(x)).float() - mine(y)) ** 2).mean()
        loss.backward()
        results.append(loss.detach())
        if last:
            results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    return [*results, *[p.detach().full_tensor() for p in model.parameters()]]


def check(shape: tuple[int, ...], accumulate: int, half: bool) -> None:
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
    torch.manual_seed(0)
    model = Model()
    theirs = program(torch_fsdp, copy.deepcopy(model), 10, accumulate, mesh, precision)
    ours = program(our_fsdp, model, 10, accumulate, mesh, precision)
    tolerance = 1e-2 if half else 1e-5
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "accumulate"),
    [
        ((2,), 2),
        ((2, 2), 1),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [((2,), 1), ((4,), 1), ((4,), 2), ((2, 2), 2)]),
    ],
)
def test_single_precision(shape, accumulate):
    run_ranks(torch.Size(shape).numel(), check, shape, accumulate, False)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_mixed_precision(world):
    run_ranks(world, check, (world,), 2, True)
