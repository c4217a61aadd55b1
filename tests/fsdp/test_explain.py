"""What `explain` says is what runs: before the first step for models that run as they are built, afterwards for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp.compare import Block, Model, shard_blocks
from ranks import run_ranks
from terrazzo.fsdp import MixedPrecisionPolicy, explain, fully_shard, trace
from terrazzo.fsdp.plan.operations import Kind


def layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def each_of(*modules: Any, **options: Any) -> None:
    for module in modules:
        fully_shard(module, **options)


# ------------------------------------------------------------------ models


def chain() -> Any:
    """The root returns what the last layer does, and has nothing of its own."""
    model = nn.Sequential(*[layer() for _ in range(3)])
    each_of(*model, model)
    return model


def chain_that_frees() -> Any:
    model = nn.Sequential(*[layer() for _ in range(3)])
    each_of(*model, model, reshard_after_forward=True)
    return model


def chain_with_own() -> Any:
    model = nn.Sequential(nn.Linear(6, 6), layer(), layer())
    each_of(*model[1:], model, reshard_after_forward=True)
    return model


def chain_that_ends_with_own() -> Any:
    model = nn.Sequential(layer(), layer(), nn.Linear(6, 6))
    each_of(*model[:2], model, reshard_after_forward=True)
    return model


def chain_in_a_chain() -> Any:
    model = nn.Sequential(layer(), nn.Sequential(layer(), nn.Sequential(layer(), layer())))
    each_of(model[0], model[1][0], *model[1][1], model, reshard_after_forward=True)
    return model


def chain_in_another_precision() -> Any:
    """The root returns a tensor of its own then."""
    model = nn.Sequential(layer(), layer())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    each_of(*model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=policy)
    return model


def usual() -> Any:
    return shard_blocks(Model(), reshard_after_forward=True)


def nested() -> Any:
    """Groups in groups."""
    model = nn.Sequential(nn.Sequential(layer(), nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), layer()))
    each_of(model[0][0], model[1][1], *model, model, reshard_after_forward=True)
    return model


def registered_twice() -> Any:
    first, second = layer(), layer()
    model = nn.Sequential(first, second, first)
    each_of(first, second, model, reshard_after_forward=True)
    return model


def frozen_first() -> Any:
    """Backward never comes to the first layers."""
    model = nn.Sequential(*[layer() for _ in range(4)])
    model[:2].requires_grad_(False)
    each_of(*model, model, reshard_after_forward=True)
    return model


def frozen_between() -> Any:
    model = nn.Sequential(*[layer() for _ in range(3)])
    model[1].requires_grad_(False)
    each_of(*model, model, reshard_after_forward=True)
    return model


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.other(self.shared(x)))


def called_twice() -> Any:
    model = CalledTwice()
    each_of(model.shared, model.other, model, reshard_after_forward=True)
    return model


class Tied(nn.Module):
    """Embedding and head share a weight, and are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(6, 6), nn.ModuleList([layer(), layer()]), nn.Linear(6, 6)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied() -> Any:
    model = Tied()
    each_of(*model.blocks, [model.embed, model.head], model, reshard_after_forward=True)
    return model


class Backwards(nn.Module):
    """Runs its layers in another order than it has them, and its own first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers, self.embed = (
            nn.Linear(6, 6),
            nn.ModuleList([layer() for _ in range(3)]),
            nn.Linear(6, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for each in reversed(self.layers):
            x = each(x)
        return x


def backwards() -> Any:
    model = Backwards()
    each_of(*model.layers, model, reshard_after_forward=True)
    return model


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(6, 7), nn.ModuleList([Block() for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputed(reentrant: bool) -> Any:
    return shard_blocks(Recomputed(reentrant), reshard_after_forward=True)


def recomputed_inside() -> Any:
    """As torchtitan has it: each group is a wrapper around a block."""
    model = nn.Sequential(*[checkpoint_wrapper(layer()) for _ in range(3)])
    each_of(*model, model, reshard_after_forward=True)
    return model


@dataclass
class Case:
    make: Callable[[], Any]
    foreseen: bool = True  # whether it runs as it is built


CASES = {
    "chain": Case(chain),
    "chain that frees": Case(chain_that_frees),
    "chain with own": Case(chain_with_own),
    "chain that ends with own": Case(chain_that_ends_with_own),
    "chain in a chain": Case(chain_in_a_chain),
    "chain in another precision": Case(chain_in_another_precision),
    "usual": Case(usual),
    "nested": Case(nested),
    "registered twice": Case(registered_twice),
    "frozen first": Case(frozen_first),
    "frozen between": Case(frozen_between),
    "tied": Case(tied, False),  # its root hands on, too
    "called twice": Case(called_twice, False),
    "backwards": Case(backwards, False),
    "recomputed": Case(lambda: recomputed(False), False),
    "recomputed, reentrant": Case(lambda: recomputed(True), False),
    "recomputed inside": Case(recomputed_inside, False),
}


def check_case(name: str) -> None:
    case = CASES[name]
    for bound in (0, 1500, 4 << 20):
        torch.manual_seed(0)
        model = case.make()
        model.set_coalesce_bytes(bound)
        before = explain(model)
        x = torch.randn(4, 6)
        for _ in range(2):
            model(x).float().sum().backward()
        with trace(model) as steps:
            model(x).float().sum().backward()
        ran = [str(each) for each in steps.operations]
        for when, plan in (("before", before), ("after", explain(model))):
            said = [str(each) for each in plan.operations if each.kind is not Kind.WRITE]
            if when == "after" or case.foreseen:
                assert said == ran, f"{name}, {when}, {bound}"
            assert plan.moved == sum(each.moves for each in plan.operations)
        with torch.no_grad():  # what has no backward is no step
            model(x)
        assert [str(each) for each in explain(model).operations if each.kind is not Kind.WRITE] == ran


@pytest.mark.parametrize("name", CASES)
def test_what_is_explained_is_what_runs(name):
    run_ranks(2, check_case, name)


def check_settings() -> None:
    """What was set since the last step is in the next one's plan."""
    model = usual()
    model.set_coalesce_bytes(0)
    x = torch.randn(4, 6)
    model(x).sum().backward()
    gathers = [each for each in explain(model).operations if each.kind is Kind.GATHER]
    model.set_reshard_after_forward(False)
    fewer = [each for each in explain(model).operations if each.kind is Kind.GATHER]
    assert len(gathers) == 8 and len(fewer) == 4


def test_settings_since_the_last_step_count():
    run_ranks(2, check_settings)
