"""Models that have modules in common, as of generators and critics, teachers and students, heads on one backbone."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import whole
from ranks import run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import explain, fully_shard, report, trace
from terrazzo.fsdp.plan.operations import Kind

pytestmark = pytest.mark.on_late


def layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


class Chain(nn.Module):
    def __init__(self, shared: nn.Module, more: int) -> None:
        super().__init__()
        self.shared, self.more = shared, nn.ModuleList([layer() for _ in range(more)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for each in self.more:
            x = each(x)
        return x


class Around(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.before, self.shared, self.after = nn.Linear(6, 6), shared, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.shared(self.before(x)))


def models() -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    shared = layer()
    ours = [Chain(shared, 1), Around(shared), Chain(shared, 3)]
    return ours, copy.deepcopy(ours)


def parameters(models: list[Any]) -> list[Any]:
    return list(dict.fromkeys(p for model in models for p in model.parameters()))


def check_way(reshard: bool | None, keep: bool, bound: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    ours, theirs = models()
    fully_shard(ours[0].shared, reshard_after_forward=reshard)
    for each in [*ours[0].more, *ours[2].more, *ours]:
        fully_shard(each, reshard_after_forward=reshard)
    for each in ours:
        each.set_reshard_after_backward(not keep)
        each.set_coalesce_bytes(bound)
    params, expected = parameters(ours), parameters(theirs)
    optimizers = [torch.optim.SGD(some, 0.1, momentum=0.5) for some in (params, expected)]
    for i in range(6):
        x = torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(i))
        part = x[4 * rank :][:4]
        if i % 2:  # one backward for all of them
            torch.stack([model(part).square().mean() for model in ours]).sum().backward()
        else:
            for model in ours:
                model(part).square().mean().backward()
        torch.stack([model(x).square().mean() for model in theirs]).sum().backward()
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=f"{reshard} {keep} {bound} {i}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for model, reference in zip(ours, theirs, strict=True):
                torch.testing.assert_close(model(x), reference(x))


def check_training(every: bool) -> None:
    """In every combination of the settings, or so that each two values of two settings meet."""
    for number, (reshard, keep) in enumerate(product((None, True, False), (False, True))):
        for bound in (0, 4 << 20) if every else [4 << 20 if (number // 2 + keep) % 2 else 0]:
            check_way(reshard, keep, bound)


@pytest.mark.parametrize("world", [1, 2])
def test_models_that_share_a_module_train_as_on_one_process(world):
    run_ranks(world, check_training, False)


@pytest.mark.long
def test_models_that_share_a_module_train_so_in_every_combination():
    run_ranks(2, check_training, True)


def check_views() -> None:
    """Each model has its own plan, report and order."""
    ours, _ = models()
    fully_shard(ours[0].shared)
    for each in [*ours[0].more, *ours[2].more, *ours]:
        fully_shard(each, reshard_after_forward=True)
    x = torch.randn(4, 6)
    for _ in range(2):
        for model in ours:
            model(x).sum().backward()
    for model, groups in zip(ours, (2, 2, 4), strict=True):
        model.set_coalesce_bytes(0)
        model(x).sum().backward()
        with trace(model) as steps:
            model(x).sum().backward()
        ran = [str(each) for each in steps.operations]
        assert ran == [str(each) for each in explain(model).operations if each.kind is not Kind.WRITE]
        assert len(report(model).groups) == groups and report(model).moved == steps.total_bytes()
        model.reset_iter_state()
    prefetched = [each for each in explain(ours[2]).operations if each.why == "prefetch"]
    assert len(prefetched) == 7, "three in forward and four in backward, in the order of this model"
    with pytest.raises(FSDPError, match="reset_iter_state must be called on the root module"):
        ours[2].more[0].reset_iter_state()


@pytest.mark.cpu_only("counts messages")
def test_each_model_has_its_own_plan():
    run_ranks(2, check_views)
