"""Losses that reach some groups on some ranks only: all ranks gather and reduce all of them in one order, and train as
one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.compare import assert_same_parameters, checked, whole
from fsdp.plan_checker import collectives
from ranks import device_type, run_ranks
from terrazzo.fsdp import fully_shard, trace
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late

WIDTH = 6


def layer(outputs: int = WIDTH, hidden: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Heads(nn.Module):
    """A body, and heads that all run; the last head's input does not depend on parameters."""

    def __init__(self, hidden: tuple[int, ...] = (5, 5, 5), recompute: bool = False) -> None:
        super().__init__()
        self.body = layer()
        self.heads = nn.ModuleList([layer(hidden=each) for each in hidden])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.body(x).tanh() * self.scale
        first, *others, last = self.heads
        found = [checkpoint(first, h, use_reentrant=False) if self.recompute else first(h)]
        return [*found, *[head(h) for head in others], last(x)]


class Again(nn.Sequential):
    """A layer that computes itself again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class AgainReentrant(Again):
    reentrant = True


def heads_again(kind: type[Again]) -> nn.Module:
    model = Heads((5, 9, 3))
    for i in range(2):
        model.heads[i] = kind(*model.heads[i])
    return model


class Segment(Heads):
    """All heads are computed again together."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return checkpoint(super().forward, x, use_reentrant=False)


class Experts(nn.Module):
    """All experts run on each rank, and each rank's rows use one; those of a second layer are used by all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = (nn.ModuleList([layer() for _ in range(3)]) for _ in range(2))
        self.head = layer()

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.embed(x)
        for i, experts in enumerate((self.first, self.second)):
            found = [expert(x) for expert in experts]
            x = x + (found[which] if i == 0 else sum(found[:2]))
        return self.head(x)


class Twice(nn.Module):
    """A layer runs twice, at the beginning and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.end = layer(), layer(), layer()

    def forward(self, x: Tensor) -> list[Tensor]:
        first = self.shared(x)
        return [first, self.end(self.shared(self.between(first)))]


def chosen_head(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    yield model(x)[turn % 2].square().mean()


def any_head(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    outputs = model(x)
    yield outputs[turn % len(outputs)].square().mean()


def all_heads(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    """All ranks' losses reach all heads, though most have no part in the result."""
    outputs = model(x)
    yield outputs[turn % len(outputs)].square().mean() + sum(0 * each.sum() for each in outputs)


def slope_of_a_head(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    x = x.clone().requires_grad_()
    (loss,) = all_heads(model, x, turn)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    yield slope.square().mean()


def one_of_two_forwards(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    first, second = model(x), model(x * 2)
    chosen, other = (first, second) if turn % 2 else (second, first)
    yield chosen[turn % 2].square().mean() + 0 * other[0].sum()


def two_losses(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    """One backward after the other, of which the second's loss reaches what the first one's does not."""
    outputs = model(x)
    yield outputs[turn % 2].square().mean()
    yield outputs[2 - turn % 2].mean()


def two_forwards(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    first, second = model(x), model(x * 2)
    yield first[turn % 2].square().mean() + second[1].square().mean()


def parts(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    """The gradient of a part with respect to an input, and then the loss."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs[turn % 2].sum(), x, retain_graph=True)
    yield (outputs[(turn + 1) % 2] * slope.detach()).mean()


def chosen_expert(model: Any, x: Tensor, turn: int) -> Iterator[Tensor]:
    yield model(x, turn % 3).square().mean()


def frozen_head() -> nn.Module:
    model = Heads()
    model.heads[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, int], Iterator[Tensor]]]] = {
    "one of two heads": (Heads, chosen_head),
    "one of two large heads": (lambda: Heads((60_000, 60_000, 5)), chosen_head),
    "one of three heads of different sizes": (lambda: Heads((5, 9, 3)), any_head),
    "a frozen head": (frozen_head, any_head),
    "a head that is computed again": (lambda: Heads(recompute=True), any_head),
    "heads that compute themselves again": (lambda: heads_again(Again), any_head),
    "heads that compute themselves again with reentrance": (lambda: heads_again(AgainReentrant), any_head),
    "a segment, all of which is reached": (Segment, all_heads),
    "a slope, to which all heads belong": (lambda: Heads((5, 9, 3)), slope_of_a_head),
    "one of two forwards, both of which are reached": (Heads, one_of_two_forwards),
    "two losses": (Heads, two_losses),
    "two forwards": (Heads, two_forwards),
    "gradients of parts": (lambda: Heads((5, 9, 3)), parts),
    "experts": (Experts, chosen_expert),
    "a layer that runs twice": (Twice, chosen_head),
}


def shard(model: Any, **options: Any) -> Any:
    for inner in model.modules():
        if isinstance(inner, nn.Sequential):
            fully_shard(inner, **options)
    return fully_shard(model, **options)


def rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def train(name: str, options: dict[str, Any], bound: int, micro_batches: int, reduce_each: bool, steps: int) -> None:
    make, losses = CASES[name]
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model: Any = make().double()  # large heads have large gradients, whose sums differ in the last bits
    reference = copy.deepcopy(model)
    shard(model, **options).set_coalesce_bytes(bound)
    ours, theirs = (
        torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3) for module in (model, reference)
    )
    with checked(model), trace(model) as ran:
        for step in range(steps):
            for i in range(micro_batches):
                model.set_requires_gradient_sync(reduce_each or i == micro_batches - 1)
                for loss in losses(model, rows(step + i, rank), step + i + rank):
                    loss.backward(retain_graph=True)
                for each in range(world):
                    for loss in losses(reference, rows(step + i, each), step + i + each):
                        (loss / world).backward(retain_graph=True)
            for (path, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, step, path)
                if q.grad is not None:
                    torch.testing.assert_close(whole(p.grad), q.grad, msg=lambda m, at=path: f"{name}, {at}: {m}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, collectives(ran.operations))
    assert all(each == everyone[0] for each in everyone), name
    assert_same_parameters(model, reference)


WAYS: list[tuple[dict[str, Any], int, int, bool]] = [
    ({}, 0, 1, True),
    ({"reshard_after_forward": False}, 4 << 20, 2, False),
    ({"reshard_after_forward": True}, 4 << 20, 2, True),
]


def check_cases() -> None:
    """Each case once, in a way that differs from that of its neighbours."""
    for i, name in enumerate(CASES):
        train(name, *WAYS[i % 3], steps=4)


WAYS_OF_4 = [*WAYS, ({"mesh": (2, 2)}, 0, 2, False), ({"reshard_after_forward": 2}, 0, 1, True)]


def check_all_cases(way: int) -> None:
    options, *others = WAYS_OF_4[way]
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh(device_type(), options["mesh"])}
    for name in CASES:
        train(name, options, *others, steps=10)


def test_losses_that_reach_other_groups_on_other_ranks():
    run_ranks(2, check_cases)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "way"), [(2, way) for way in range(len(WAYS))] + [(4, way) for way in range(len(WAYS_OF_4))]
)
def test_losses_that_reach_other_groups_in_every_way(world, way):
    run_ranks(world, check_all_cases, way)
