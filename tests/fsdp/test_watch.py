"""Ranks that run different modules are told, on every kind of device, also if each of them has run before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import adamw, apart, whole
from fsdp.test_streams import recording
from ranks import run_ranks
from terrazzo.errors import DivergedRanksError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import init_device_mesh


class Branches(nn.Module):
    """Runs one of two layers of the same size, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.x, self.y = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        x = self.body(x)
        return x if branch == "none" else getattr(self, branch)(x)


def branches(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Branches()
    for inner in (model.body, model.x, model.y):
        fully_shard(inner, **options)
    model = fully_shard(model, **options)
    return apart(model)


def step(model: Any, optimizer: torch.optim.Optimizer, branch: str) -> None:
    model(torch.ones(2, 4), branch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def known_branches() -> tuple[Any, torch.optim.Optimizer]:
    """A model whose ranks have run both branches, together; none of them is gathered ahead."""
    model = branches()
    optimizer = adamw(model)
    for branch in ("x", "y", "none"):
        step(model, optimizer, branch)
    return model, optimizer


def own_branch() -> str:
    return "xy"[dist.get_rank()]


TOLD = "event . .* was rank 0 run x, rank 1 run y"


def check_on_cpu() -> None:
    model, optimizer = known_branches()
    before = [whole(p).clone() for p in model.parameters()]
    with pytest.raises(DivergedRanksError, match=TOLD):
        step(model, optimizer, own_branch())
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True))


def check_on_device() -> None:
    """The stand-in for an accelerator decides when the host finds a result."""
    for late in (False, True):
        with recording() as recorded:
            model, optimizer = known_branches()
            recorded.has_results = not late
            with pytest.raises(DivergedRanksError, match=TOLD):
                for i in range(3):
                    step(model, optimizer, own_branch() if i == 0 else "none")
            assert i == 2 * late, "a result that has come is looked at, and one of two steps ago is waited for"
    with recording() as recorded:
        model, optimizer = known_branches()
        recorded.has_results = False
        step(model, optimizer, own_branch())
        with pytest.raises(DivergedRanksError, match=TOLD):
            model.state_dict()


def check_evaluations() -> None:
    """Without a backward, too."""
    for device in (nullcontext, recording):
        with device():
            model, optimizer = known_branches()
            with pytest.raises(DivergedRanksError, match=TOLD):
                with torch.no_grad():
                    model(torch.ones(2, 4), own_branch())
                step(model, optimizer, "none")


def check_separate_models() -> None:
    """Models of one kind that were sharded separately are told apart, and gradients of the wrong one are not used."""
    for device in (nullcontext, recording):
        with device():
            models: list[Any] = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
            params = [p for model in models for p in model.parameters()]
            optimizer = torch.optim.SGD(params, lr=1.0)
            outputs = [model(torch.ones(2, 4)) for model in models]
            sum(outputs).sum().backward()
            optimizer.zero_grad()
            before = [p.to_local().clone() for p in params]
            outputs = [model(torch.ones(2, 4)) for model in models]
            with pytest.raises(DivergedRanksError, match="ranks ran different modules"):
                outputs[dist.get_rank()].sum().backward()
                optimizer.step()
            assert all(torch.equal(p.to_local(), q) for p, q in zip(params, before, strict=True))


def check_replicas() -> None:
    """Gradients that replicas sum are those of the same modules, with shards of a size of 1 as in DDP, too."""
    for device in (nullcontext, recording):
        with device():
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
            model = branches(mesh=mesh)
            optimizer = adamw(model)
            for branch in ("x", "y", "none"):
                step(model, optimizer, branch)
            before = [whole(p).clone() for p in model.parameters()]
            with pytest.raises(DivergedRanksError, match="rank 0 all-reduce x, rank 1 all-reduce y"):
                step(model, optimizer, own_branch())
            assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before, strict=True))


def check_settings() -> None:
    """Where ranks would reduce other gradients, or not all of them, no one does."""

    def freeze(model: Any) -> None:
        model.x.weight.requires_grad_(False)

    changes: list[tuple[str, Any]] = [
        ("has x with trained parameters 0b10, .* rank 1 has x with trained parameters 0b11", freeze),
        ("has x with .*rank 1 has x with .*, gradient_sync", lambda m: m.x.set_requires_gradient_sync(False)),
        ("has x with .*rank 1 has x with .* reshard_after_forward", lambda m: m.x.set_reshard_after_forward(False)),
    ]
    for text, change in changes:
        model, optimizer = known_branches()
        params = list(model.parameters())
        before = [whole(p).clone() for p in params]
        if dist.get_rank() == 0:
            change(model)
        with pytest.raises(DivergedRanksError, match=text):
            step(model, optimizer, "x")
        assert all(torch.equal(whole(p), q) for p, q in zip(params, before, strict=True))


def check_all() -> None:
    for check in (
        check_replicas,
        check_on_cpu,
        check_on_device,
        check_evaluations,
        check_separate_models,
        check_settings,
    ):
        check()


def test_ranks_that_run_known_modules_but_not_the_same():
    run_ranks(2, check_all)
