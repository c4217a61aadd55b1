"""Parameters that only some ranks' data reach: experts, embeddings, a modality. As one process trains them, also with
weight decay, which leaves alone what nobody reached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import PER_RANK, assert_same_parameters, checked, mine
from ranks import device_type, run_ranks
from terrazzo.checkpoint import save
from terrazzo.checkpoint.state_dict import get_state_dict
from terrazzo.comm import add_observer, remove_observer
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late

EXPERTS = 6


class Mixture(nn.Module):
    """Each row goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.experts = nn.ModuleList([nn.Linear(7, 7) for _ in range(EXPERTS)])

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        out = self.norm(x)
        for i, expert in enumerate(self.experts):
            rows = (route == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Embedding(11, 7), nn.Linear(3, 7)  # a batch has one of them, or both
        self.blocks = nn.ModuleList([Mixture() for _ in range(2)])
        self.head = nn.Linear(7, 3)
        self.never = nn.Parameter(torch.ones(5, 3))

    def forward(self, ids: Tensor, picture: Tensor, route: Tensor) -> Tensor:
        x = torch.zeros(len(ids), 7, dtype=picture.dtype)
        has_text, has_picture = (ids >= 0).nonzero().flatten(), (ids < 0).nonzero().flatten()
        if len(has_text):
            x = x.index_add(0, has_text, self.text(ids[has_text]))
        if len(has_picture):
            x = x.index_add(0, has_picture, self.image(picture[has_picture]))
        for block in self.blocks:
            x = block(x, route)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole: ranks have text or pictures by turns, and some experts nobody."""
    generator = torch.Generator().manual_seed(step)
    rows = PER_RANK * dist.get_world_size()
    ids = torch.randint(0, 11, (rows,), generator=generator)
    rank = torch.arange(rows) // PER_RANK
    ids = torch.where((rank + step) % 2 == 0, ids, -1)
    route = torch.where(rank == 0, step % EXPERTS, torch.randint(0, EXPERTS - 1, (rows,), generator=generator))
    return ids, torch.randn(rows, 3, generator=generator), route, torch.randn(rows, 3, generator=generator)


def loss_of(model: Any, parts: tuple[Tensor, ...]) -> Tensor:
    ids, picture, route, y = parts
    return ((model(ids, picture, route).float() - y) ** 2).mean()


def train(options: dict[str, Any], micro_batches: int, reduce_each: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = Partly()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    ours, theirs = (
        torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3) for module in (model, reference)
    )
    with checked(model):
        for step in range(10):
            for i in range(micro_batches):
                model.set_requires_gradient_sync(reduce_each or i == micro_batches - 1)
                whole = batch(step * micro_batches + i)
                loss_of(model, tuple(mine(part) for part in whole)).backward()
                loss_of(reference, whole).backward()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (step, name)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(model, reference)
    assert model.never.grad is None and torch.equal(model.never.full_tensor(), torch.ones(5, 3))
    return model, ours


def check_training(folder: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"reshard_after_forward": True}]
    if dist.get_world_size() == 4:
        ways = [{}, {"mesh": init_device_mesh(device_type(), (2, 2))}]
    for options in ways:
        for micro_batches, reduce_each in ((1, True), (2, True), (2, False)):
            model, optimizer = train(options, micro_batches, reduce_each)
    state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/saved")


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_partly_used_parameters_train_as_on_one_process(tmp_path, world):
    run_ranks(world, check_training, str(tmp_path))


def check_messages() -> None:
    """Whether somebody has a gradient is part of the reduction: no message more, whoever misses what."""
    events: list[Any] = []
    model: Any = Partly()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    for step in range(3):
        loss_of(model, tuple(mine(part) for part in batch(step))).backward()
        if step == 0:
            add_observer(events.append)
    remove_observer(events.append)
    assert [event.kind for event in events] == ["all_gather", "reduce_scatter"] * 2


def test_nothing_more_is_sent():
    run_ranks(2, check_messages)


class Through(nn.Module):
    """A group of which a rank may use nothing, though backward passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return x + self.inner(x) if use else x * 1


def check_passed_through() -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"first": nn.Linear(3, 3), "through": Through()})
    reference = copy.deepcopy(model)
    for name in model:
        fully_shard(model[name])
    x = torch.randn(2, 3)
    model["through"](model["first"](x), dist.get_rank() == 0).sum().backward()
    reference["through"](reference["first"](x), True).sum().backward()
    grad = model["through"].inner.weight.grad.full_tensor()
    torch.testing.assert_close(grad, reference["through"].inner.weight.grad / dist.get_world_size())


def test_a_group_that_a_rank_does_not_use_at_all():
    run_ranks(2, check_passed_through)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        for i in which:
            x = x + torch.tanh(self.blocks[i](x))
        return x


def check_left_out() -> None:
    """A group that the last micro-batch does not run has gradients of those before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    modes = [("none", "all"), ("all", "all")]
    if world == 4:
        modes += [("shards", "all"), ("none", "shards", "all"), ("shards", "none", "all")]
    mesh = init_device_mesh(device_type(), (2, 2) if world == 4 else (world,))
    for mode in modes:
        torch.manual_seed(0)
        model: Any = Layers()
        reference = copy.deepcopy(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for bound in (0, 4 << 20):
            model.set_coalesce_bytes(bound)
            for i, what in enumerate(mode):
                which = (0, 1, 2) if i == 0 else (0, 2)
                model.set_requires_gradient_sync(what != "none")
                model.set_requires_all_reduce(what == "all")
                x = torch.randn(2 * world, 7, generator=torch.Generator().manual_seed(i))
                model(x[2 * rank :][:2], which).square().mean().backward()
                reference(x, which).square().mean().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{mode}, {bound}")
            model.zero_grad()
            reference.zero_grad()


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_that_the_last_micro_batch_leaves_out(world):
    run_ranks(world, check_left_out)


def check_frozen_meanwhile() -> None:
    """A parameter that is frozen between micro-batches keeps the gradient of those before; the others have all."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model, mp_policy=policy)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for last, frozen in ((1, False), (1, True), (0, False)):
        for i in range(last + 1):
            model.set_requires_gradient_sync(i == last)
            model[0].bias.requires_grad_(not (frozen and i == 1))
            model(x * (i + 1)).float().square().sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        model[0].bias.requires_grad_(True)
        model.zero_grad()
    both, frozen_meanwhile, first = found
    for name, grad in frozen_meanwhile.items():
        assert torch.equal(grad, (first if name == "0.bias" else both)[name]), name


def test_a_parameter_frozen_between_micro_batches():
    run_ranks(2, check_frozen_meanwhile)
