"""Modules whose parameters stay unsharded show the sharded ones, while these are what optimizers and users want."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp.compare import (
    Counted,
    Model,
    adamw,
    apart,
    assert_same_parameters,
    batches,
    loss_of,
    mine,
    shard_blocks,
    where_of,
    whole,
)
from ranks import device_type, run_ranks
from terrazzo.errors import DivergedRanksError
from terrazzo.fsdp import FSDPModule, fully_shard
from terrazzo.fsdp.plan.state import Where
from terrazzo.tensor import DTensor

pytestmark = pytest.mark.on_late

PASSES = ("an evaluation", "kept", "kept, an evaluation", "freed")


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def double_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 2


def nothing(model: nn.Module) -> None:
    pass


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def average(model: Any) -> None:
    """Read, and write what was read."""
    for p in model.parameters():
        p.data.mul_(0.5)
    model.seen = [whole(p).clone() for p in model.parameters()]


USES: list[tuple[Callable[[Any], None], Callable[[Any], None]]] = [
    (clip, nothing),
    (double_gradients, nothing),
    (nothing, clamp),
    (clamp, nothing),
    (average, average),
]


def check_uses(how: str, uses: slice = slice(None), options: dict[str, Any] | None = None) -> None:
    for before, after in USES[uses]:
        torch.manual_seed(0)
        reference: Any = Model()
        model: Any = shard_blocks(copy.deepcopy(reference), **(options or {}))
        model.set_reshard_after_backward("kept" not in how)
        pairs = [(model, adamw(model)), (reference, adamw(reference))]
        for x, y in batches(3):
            for each, optimizer in pairs:
                sharded = each is model
                for _ in range(2):  # micro-batches
                    loss_of(each, *((mine(x), mine(y)) if sharded else (x, y))).backward()
                if "evaluation" in how:
                    with torch.no_grad():
                        each(mine(x))
                before(each)
                optimizer.step()
                optimizer.zero_grad()
                after(each)
            with torch.no_grad():
                torch.testing.assert_close(model(x), reference(x))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for ours, theirs in zip(getattr(model, "seen", ()), getattr(reference, "seen", ()), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("how", PASSES)
def test_what_is_done_to_parameters_between_backward_and_forward(world: int, how: str) -> None:
    run_ranks(world, check_uses, how)


@pytest.mark.parametrize(
    "uses", [slice(0, 3, 2), pytest.param(slice(None), marks=pytest.mark.long)], ids=["two", "all"]
)
def test_what_is_done_to_parameters_of_which_parts_are_kept(uses: slice) -> None:
    run_ranks(4, check_uses, "an evaluation", uses, {"reshard_after_forward": 2})


def check_gathers() -> None:
    """Nothing is gathered again for parameters that rest."""
    model: Any = shard_blocks(Model())
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    (x, y), *_ = batches(1)
    for step in range(2):
        for micro in range(3):
            with Counted() as kinds:
                loss_of(model, mine(x), mine(y)).backward()
            assert ("all_gather" in kinds) == (micro == 0), (step, micro, kinds)
            assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None


def check_the_last() -> None:
    """Backward begins with it, so it would be gathered again as soon as it is freed."""
    model: Any = apart(shard_blocks(Model()))
    blocks, (x, y) = model.blocks, next(batches(1))

    def gathers(before: Callable[[], object] = lambda: None) -> int:
        with Counted() as kinds:
            loss = loss_of(model, mine(x), mine(y))
            before()
            loss.backward()
        assert {where_of(block) for block in blocks} == {Where.SHARDED}
        return kinds.count("all_gather")

    def evaluate() -> None:
        with torch.no_grad():
            model(mine(x))
        assert {where_of(block) for block in blocks} == {Where.SHARDED}  # no backward follows

    assert [gathers() for _ in range(3)] == [7, 6, 6]  # the root's once, and those of three blocks
    for last in (False, False, True):  # nothing is gathered ahead for a backward that has been
        model.set_is_last_backward(last)
        assert gathers() == 6
    loss = loss_of(model, mine(x), mine(y))
    assert [where_of(block) for block in blocks] == [Where.SHARDED, Where.SHARDED, Where.AWAITED]
    assert all(isinstance(p, DTensor) for p in blocks.parameters())  # as in PyTorch
    loss.backward()
    assert gathers(evaluate) == 6 + 4  # of four in the evaluation the root's is left out, and one is gathered again
    assert gathers(model.state_dict) == 6 + 2  # everything is resharded, the root too
    for _ in range(2):  # no backward follows
        model(mine(x))
        assert [where_of(block) for block in blocks] == [Where.SHARDED, Where.SHARDED, Where.AWAITED]
    assert gathers() == 5  # nothing is gathered ahead for these forwards; the root is there already
    model(mine(x))
    with torch.no_grad():
        blocks[0](torch.ones(1, blocks[0].up.in_features))  # what runs then has the memory
    assert {where_of(block) for block in blocks} == {Where.SHARDED}
    gathers()
    model.set_reshard_after_forward(True)
    assert [gathers() for _ in range(2)] == [8, 8]


def check_writes_before_backward(alone: bool) -> None:
    """Backward uses what was written to the shards since forward, as on one device; also if one rank alone wrote."""
    torch.manual_seed(0)
    reference: Any = Model()
    model: Any = shard_blocks(copy.deepcopy(reference))
    params = [(p, q) for p, q in zip(model.blocks[2].parameters(), reference.blocks[2].parameters(), strict=True)]
    rows = [-(-len(q) // dist.get_world_size()) if alone else len(q) for _, q in params]
    for step, (x, y) in enumerate(batches(3)):
        loss, expected = loss_of(model, mine(x), mine(y)), loss_of(reference, x, y)
        assert where_of(model.blocks[2]) is (Where.AWAITED if step else Where.SHARDED)
        for (p, q), end in zip(params, rows, strict=True):
            if not alone or dist.get_rank() == 0:
                p.data.mul_(1.5)
            q.data[:end].mul_(1.5)
        loss.backward()
        expected.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)
            p.grad = q.grad = None
    loss = loss_of(model, mine(x), mine(y))
    with torch.no_grad():
        for p in model.blocks[2].parameters():
            p.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as on one device
        loss.backward()


def check_a_write_by_one_rank_before_backward() -> None:
    """Where ranks do not wait for each other, they go on together with the former values until all know it."""
    model: Any = shard_blocks(Model())
    first, (x, y) = batches(2)
    loss_of(model, *map(mine, first)).backward()
    loss = loss_of(model, mine(x), mine(y))
    assert where_of(model.blocks[2]) is Where.AWAITED
    if dist.get_rank() == 0:
        model.head.weight.data.mul_(1.5)
    with pytest.raises(DivergedRanksError, match="rank 0 wrote to .* other ranks did not"):
        loss.backward()
        model.state_dict()


def check_views() -> None:
    """Where PyTorch's program gets plain tensors, so it does here."""
    model: Any = fully_shard(Model())
    (x, y), *_ = batches(1)
    with torch.no_grad():
        model(mine(x))
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # no gradients wait
    loss = loss_of(model, mine(x), mine(y))
    assert not any(isinstance(p, DTensor) for p in model.parameters())  # a loss may use them
    loss.backward()
    with torch.no_grad():
        model(mine(x))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.unshard()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    model.reshard()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    for stepping, sharded in ((other, True), (model, False)):  # the gradients of the model wait for its own step
        torch.optim.SGD(stepping.parameters(), lr=0.1).step()
        with torch.no_grad():
            model(mine(x))
        assert all(isinstance(p, DTensor) == sharded for p in model.parameters()), sharded
    # A model that becomes part of another one while it rests.
    loss_of(model, mine(x), mine(y)).backward()
    with torch.no_grad():
        model(mine(x))
    assert where_of(model) is Where.RESTING
    outer: Any = fully_shard(nn.Sequential(model, nn.Linear(3, 3)))
    assert outer(mine(x)).shape == (4, 3)


def check_gradients_by_hand() -> None:
    """As evolution strategies set them: PyTorch's optimizer ignores them in silence."""
    model: Any = shard_blocks(Model())
    optimizer = adamw(model)
    (x, y), *_ = batches(1)
    with torch.no_grad():
        model(mine(x))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"\.grad of parameters \('embed.weight', .*call reshard|Call reshard"):
        optimizer.step()
    model.zero_grad()
    loss_of(model, mine(x), mine(y)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        model.set_requires_gradient_sync(False)
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        optimizer.step()  # nothing has been reduced, as was asked for


def check_penalty_after_backward() -> None:
    """Its gradients come when those of the model are reduced: nobody reduces them."""
    model: Any = shard_blocks(Model())
    optimizer = adamw(model)
    (x, y), *_ = batches(1)
    loss = loss_of(model, mine(x), mine(y))
    penalty = sum(p.sum() for p in model.embed.parameters())
    loss.backward()
    penalty.backward()
    with pytest.warns(UserWarning, match=r"\.grad of parameters \('embed.weight', .*or by a backward after"):
        optimizer.step()


def check_steps_in_backward() -> None:
    """An optimizer that steps in hooks leaves no gradients: what modules show is new all the same."""
    torch.manual_seed(0)
    reference: Any = Model()
    model: Any = shard_blocks(copy.deepcopy(reference))
    model.set_reshard_after_backward(False)
    pairs = (model, reference)
    for module in pairs:
        for p in module.parameters():
            own = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad()) and None)
    for x, y in batches(3):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert_same_parameters(model, reference)
        for module in pairs:
            clamp(module)
        assert_same_parameters(model, reference)


def test_writes_to_shards_before_backward() -> None:
    run_ranks(2, check_writes_before_backward, False)


@pytest.mark.cpu_only("on accelerators it raises an error, see below")
def test_writes_of_one_rank_to_shards_before_backward() -> None:
    run_ranks(2, check_writes_before_backward, True)


@pytest.mark.on_late(sample=True)
def test_writes_of_one_rank_to_shards_before_backward_on_accelerators() -> None:
    if device_type() != "cpu":
        run_ranks(2, check_a_write_by_one_rank_before_backward)


def test_gathers_and_what_modules_show() -> None:
    run_ranks(2, check_gathers)
    run_ranks(2, check_the_last)
    run_ranks(2, check_views)
    run_ranks(2, check_gradients_by_hand)
    run_ranks(2, check_penalty_after_backward)
    run_ranks(2, check_steps_in_backward)
