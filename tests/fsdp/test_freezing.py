"""`requires_grad` set in the middle of training, on sharded and on unsharded parameters, trains as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.compare import Model, adamw, assert_same_parameters, batches, loss_of, mine, shard_blocks
from ranks import run_ranks
from terrazzo.fsdp import FSDPModule

pytestmark = pytest.mark.on_late(both=True)

Params = dict[str, Any]


def as_they_are(module: Any, kept: Params) -> Params:
    """What `named_parameters` gives now: some are unsharded, if there was a forward."""
    return dict(module.named_parameters())


def as_they_were(module: Any, kept: Params) -> Params:
    """What an optimizer holds."""
    return kept


def check_freezing() -> None:
    for find in (as_they_are, as_they_were):
        check_one(find, "head.weight", keep=False)
        check_one(find, "blocks.1.up.weight", keep=True)


def check_one(find: Callable[[Any, Params], Params], name: str, keep: bool) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    model.set_reshard_after_backward(not keep)
    both = [(each, dict(each.named_parameters()), adamw(each)) for each in (model, reference)]
    for step, (x, y) in enumerate(batches(5)):
        with torch.no_grad():
            model(x)  # leaves the root unsharded
        for module, kept, optimizer in both:
            part = mine if module is model else lambda t: t
            if step in (1, 3):
                find(module, kept)[name].requires_grad_(step == 3)
            if step == 3:
                module.state_dict()  # shards, before any forward has seen it
                assert dict(module.named_parameters())[name].requires_grad
            loss_of(module, part(x), part(y)).backward()
            if keep and step == 2:  # in the middle of a step, too
                find(module, kept)["blocks.2.down.bias"].requires_grad_(False)
                loss_of(module, part(y @ torch.ones(3, 6)), part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    assert_same_parameters(model, reference)
    flags = {name: p.requires_grad for name, p in reference.named_parameters()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


def test_parameters_are_frozen_and_trained_again():
    run_ranks(2, check_freezing)


def check_between() -> None:
    """A parameter that is frozen between forward and backward gets no gradient, as in one process."""
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    for frozen, (x, y) in zip((True, False), batches(2), strict=True):
        for module, part in ((model, mine), (reference, lambda t: t)):
            loss = loss_of(module, part(x), part(y))
            module.blocks[1].requires_grad_(not frozen)
            module.head.requires_grad_(not frozen)
            loss.backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-5)
        for module in (model, reference):
            module.requires_grad_(True)
            module.zero_grad()


def test_parameters_are_frozen_between_forward_and_backward():
    run_ranks(2, check_between)


def check_thrown_away() -> None:
    """`zero_grad` of the model forgets what was added up, reduced or not."""
    for synced in (False, True):
        torch.manual_seed(0)
        model: Any = Model()
        reference: nn.Module = copy.deepcopy(model)
        shard_blocks(model)
        (x, y), (v, w) = batches(2)
        model.set_requires_gradient_sync(synced)
        loss_of(model, mine(x), mine(y)).backward()
        with torch.no_grad():
            model(x)  # leaves the root unsharded
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        loss_of(model, mine(v), mine(w)).backward()
        loss_of(reference, v, w).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-5)


def test_gradients_are_thrown_away():
    run_ranks(2, check_thrown_away)
