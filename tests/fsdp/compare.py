"""What the tests of fully_shard share: small models with awkward shapes, and the comparison with a single process.

A rank trains the sharded model on its part of each batch and, beside it, an ordinary copy on the whole batch.  Whatever
the sharding, losses and parameters have to stay equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.plan_checker import check, plan_steps
from terrazzo.comm import add_observer, remove_observer
from terrazzo.fsdp import fully_shard, trace
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan.state import Where
from terrazzo.fsdp.run.root import root_of
from terrazzo.tensor import DTensor

WIDTH, HIDDEN, INPUTS, OUTPUTS = 7, 10, 6, 3  # 7 is uneven on 2 and 4 ranks, 3 leaves a rank of 4 empty
PER_RANK = 4


class Counted:
    """The kinds of collectives while the context lasts."""

    def __enter__(self) -> list[str]:
        self.kinds: list[str] = []
        self.observer = lambda event: self.kinds.append(event.kind)
        add_observer(self.observer)
        return self.kinds

    def __exit__(self, *error: object) -> None:
        remove_observer(self.observer)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 3, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(blocks)])
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_blocks(model: Any, **options: Any) -> Any:
    """The usual way: each block, then the whole."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def apart(model: Any) -> Any:
    """Each group goes alone, also if it is small."""
    model.set_coalesce_bytes(0)
    return model


def batches(steps: int, seed: int = 1, ranks: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches, the same on every rank."""
    ranks = dist.get_world_size() if ranks is None else ranks
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(PER_RANK * ranks, INPUTS, generator=generator)
        yield x, torch.randn(PER_RANK * ranks, OUTPUTS, generator=generator)


def mine(batch: Tensor, index: int | None = None) -> Tensor:
    """This rank's part."""
    index = dist.get_rank() if index is None else index
    return batch[index * PER_RANK : (index + 1) * PER_RANK]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same_parameters(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        found = whole(ours[name]).to(parameter.device)  # from where an offload policy has put it
        torch.testing.assert_close(found, parameter.detach(), rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def train_alike(
    shard: Callable[[Any], Any],
    *,
    make: Callable[[], nn.Module] = Model,
    prepare: Callable[[Any], Any] = lambda model: None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 10,
    clip: float | None = 0.5,
    tolerance: float = 1e-5,
) -> Any:
    """Train a model sharded by `shard` and a plain one side by side; returns the sharded one.

    `prepare` is done to both before (freezing, tying).
    """
    torch.manual_seed(0)
    model = make()
    prepare(model)
    reference = copy.deepcopy(model)
    prepare(reference)
    shard(model)
    with checked(model):
        train_beside(model, reference, optimizer, steps, clip, tolerance)
    assert_same_parameters(model, reference, tolerance)
    return model


def where_of(module: Any) -> Where:
    """The state of a sharded module's parameters."""
    unit = group_of(module).unit
    return root_of(group_of(module)).state.where[unit.index]


@contextmanager
def checked(model: Any) -> Iterator[None]:
    """The plan of the model, and what runs meanwhile, are free of races, and alike on all ranks."""
    with trace(model) as steps:
        yield
    spec = root_of(group_of(model)).spec()
    check(steps.operations, spec)
    check(plan_steps(spec, 2, micro_batches=2).operations, spec)


def train_beside(model: Any, reference: Any, optimizer: Any, steps: int, clip: float | None, tolerance: float) -> None:
    ours, theirs = optimizer(model), optimizer(reference)
    for x, y in batches(steps):
        loss = loss_of(model, mine(x), mine(y))
        expected = loss_of(reference, x, y)
        loss.backward()
        expected.backward()
        average = loss.detach().clone()
        dist.all_reduce(average)
        torch.testing.assert_close(average / dist.get_world_size(), expected.detach(), rtol=tolerance, atol=tolerance)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            torch.testing.assert_close(whole(norm), expected_norm, rtol=tolerance, atol=tolerance)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
