"""Schedules of PyTorch's pipelines over sharded stages, those that split backward too: the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import terrazzo
from ranks import run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import fully_shard, register_fsdp_pipeline_stage
from terrazzo.tensor import init_device_mesh

WIDTH, MICRO_BATCHES, PER_BATCH = 6, 8, 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stages_of(kind: str, rank: int, ranks: int) -> list[int]:
    """V-shaped placements give a rank the first and the last stages."""
    if kind == "1F1B":
        return [rank]
    if kind in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks]


def check_schedules_installed() -> None:
    terrazzo.install()
    try:
        check_schedules(installed=True)
    finally:
        terrazzo.uninstall()


def check_schedules(installed: bool) -> None:
    """Under `install()` stages know sharded modules, also those that are sharded afterwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    for kind, reshard in (
        ("1F1B", True),
        ("Interleaved1F1B", False),
        ("InterleavedZeroBubble", False),
        ("ZBVZeroBubble", True),
        ("DualPipeV", False),
    ):
        torch.manual_seed(0)
        mine = stages_of(kind, pp, 2)
        count = 2 * len(mine)
        parts = [Part() for _ in range(count)]
        reference = copy.deepcopy(nn.Sequential(*parts))
        stages = []
        for index in mine:
            part: Any = parts[index]
            stage = PipelineStage(part, index, count, torch.device("cpu"), group=mesh.get_group("pp"))
            fully_shard(part.up, mesh=mesh["dp"], reshard_after_forward=reshard)
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
            if not installed:
                register_fsdp_pipeline_stage(stage)
            stages.append(stage)
        make: Any = getattr(schedules, f"Schedule{kind}")
        schedule = make(stages if count > 2 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
        optimizers = [torch.optim.Adam(stage.submod.parameters(), lr=0.1) for stage in stages]
        theirs = torch.optim.Adam(reference.parameters(), lr=0.1)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2, MICRO_BATCHES * PER_BATCH, WIDTH, generator=generator)
            y = torch.randn(x.shape, generator=generator)
            args = (x[dp],) if 0 in mine else ()
            target = {"target": y[dp]} if count - 1 in mine else {}
            schedule.step(*args, **target)
            loss_of(reference(x), y).backward()
            for stage in stages:
                wanted = reference[stage.stage_index]
                for (name, p), q in zip(stage.submod.named_parameters(), wanted.parameters(), strict=True):
                    message = f"{kind}, step {step}, stage {stage.stage_index}: {name}"
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6, msg=message)
            for optimizer in (*optimizers, theirs):
                optimizer.step()
                optimizer.zero_grad()
    with pytest.raises(FSDPError, match="whose module fully_shard was called on, not one of Linear"):
        plain = PipelineStage(nn.Linear(2, 2), pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        register_fsdp_pipeline_stage(plain)


def test_gradients_of_every_schedule_are_those_of_one_process():
    run_ranks(4, check_schedules, False)


def test_stages_know_sharded_modules_when_installed():
    run_ranks(4, check_schedules_installed)
