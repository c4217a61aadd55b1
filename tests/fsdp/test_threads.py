"""Models that are trained by several threads at once, each over process groups of its own, as PyTorch allows."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.compare import whole
from ranks import run_ranks
from terrazzo.fsdp import fully_shard

STEPS = 6


def train(model: Any, mesh: DeviceMesh | None, inputs: list[torch.Tensor], delay: float) -> None:
    time.sleep(delay)
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in inputs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_threads(widths: list[int]) -> None:
    """Ranks begin the models in different orders, and go on in whatever order their threads have."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(world)) for _ in widths]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3)).double() for width in widths]
    references = copy.deepcopy(models)
    batches = [[torch.randn(world * 2, width, dtype=torch.float64) for _ in range(STEPS)] for width in widths]
    parts = [[x.chunk(world)[rank] for x in batch] for batch in batches]
    order = range(len(widths)) if rank % 2 else reversed(range(len(widths)))
    delays = {i: 0.1 * place for place, i in enumerate(order)}
    with ThreadPoolExecutor(len(widths)) as pool:
        runs = [pool.submit(train, models[i], meshes[i], parts[i], delays[i]) for i in range(len(widths))]
        for each in runs:
            each.result()
    for model, reference, batch in zip(models, references, batches, strict=True):
        train(reference, None, batch, 0)
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(found), expected)
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("widths", [[6, 6], [6, 7, 1100]], ids=["alike", "unlike"])
def test_models_on_their_own_groups_in_threads(widths: list[int]) -> None:
    run_ranks(2, check_threads, widths)


def build() -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model, and an optimizer that has nothing to do with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    return fully_shard(model), torch.optim.SGD([other], lr=0.1)


def check_step_of_one_rank() -> None:
    model, optimizer = build()
    loss = model(torch.ones(2, 6)).sum()
    if dist.get_rank() == 0:
        optimizer.step()
    model[0].reshard()
    model[0].unshard()
    loss.backward()


def test_an_optimizer_that_one_rank_has_changes_no_gather_of_a_model():
    run_ranks(2, check_step_of_one_rank)


def check_step_in_a_thread() -> None:
    model, optimizer = build()
    late = dist.get_rank() == 1
    model[1].register_forward_hook(lambda *_: time.sleep(0.6 * late))
    loss = model(torch.ones(2, 6)).sum()
    with ThreadPoolExecutor(1) as pool:
        stepped = None if late else pool.submit(optimizer.step)
        time.sleep(0 if late else 0.3)
        loss.backward()
        if stepped is not None:
            stepped.result()


def test_an_optimizer_in_a_thread_that_waits_for_what_ranks_ran_keeps_nobody_from_waiting_for_it():
    run_ranks(2, check_step_in_a_thread)
