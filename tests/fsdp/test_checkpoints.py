"""Sharded models through checkpoints: saved by some ranks and in some way, loaded by others and in other ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.compare import Model, adamw, batches, loss_of, shard_blocks, whole
from fsdp.test_tensor_parallel import Stack, parallel
from ranks import device_type, fresh_values, run_ranks
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

pytestmark = pytest.mark.on_late


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Model()
    if kind == "blocks":
        shard_blocks(model)
    elif kind == "other dim":
        shard_blocks(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    elif kind == "root":
        fully_shard(model)
    elif kind == "hsdp":
        shard_blocks(model, mesh=init_device_mesh(device_type(), (2, 2)))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, adamw(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """On the same global batches, whatever the number of ranks."""
    world = dist.get_world_size()
    for x, y in batches(steps, seed, ranks=12):
        size = len(x) // world
        part = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        loss_of(model, x[part], y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p).clone() for p in model.parameters()]


def save_after_two_steps(kind: str, path: str) -> list[torch.Tensor]:
    """What the parameters are one step after the checkpoint."""
    model, optimizer = build(kind, seed=0)
    train(model, optimizer, 2, seed=5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    train(model, optimizer, 1, seed=6)
    return parameters(model)


def load_and_train(kind: str, path: str) -> list[torch.Tensor]:
    model, optimizer = build(kind, seed=9)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 1, seed=6)
    return parameters(model)


def assert_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["blocks", "hsdp"])
def test_saved_on_four_ranks_loaded_on_two_one_and_three(tmp_path, kind):
    path = str(tmp_path / "saved")
    expected = run_ranks(4, save_after_two_steps, kind, path)[0]
    for world, other in ((2, "blocks"), (2, "other dim"), (2, "root"), (1, "blocks"), (1, "plain"), (4, "other dim")):
        assert_alike(run_ranks(world, load_and_train, other, path)[0], expected)
    if kind == "blocks":
        for value in fresh_values(3, load_and_train, "blocks", path):
            assert_alike(value, expected)


def test_into_ddp_and_back(tmp_path):
    first, second = str(tmp_path / "sharded"), str(tmp_path / "replicated")
    expected = run_ranks(2, save_after_two_steps, "blocks", first)[0]
    assert_alike(run_ranks(2, load_and_train, "ddp", first)[0], expected)
    assert_alike(run_ranks(2, save_after_two_steps, "ddp", second)[0], expected)
    assert_alike(run_ranks(4, load_and_train, "blocks", second)[0], expected)


def check_full_state() -> None:
    model, _ = build("blocks", seed=0)
    torch.manual_seed(0)
    plain = Model()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert full.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert type(full[name]) is torch.Tensor and torch.equal(full[name], value)


def test_a_full_state_dict():
    run_ranks(2, check_full_state)


def save_on_two_dims(path: str) -> None:
    torch.manual_seed(0)
    model = parallel(Stack())
    assert model.layers[0].up.weight._layout.shard_order(0) == (1, 0), "tensor parallelism cuts first"
    up = model.layers[0].up.weight
    other = distribute_tensor(torch.arange(72.0).view(12, 6), up.device_mesh, [Shard(0), Shard(0)])  # cut otherwise
    save({"model": model.state_dict(), "other": other}, checkpoint_id=path)


def load_plainly(path: str) -> None:
    torch.manual_seed(0)
    expected = Stack().state_dict()
    state = {"model": Stack().state_dict(), "other": torch.zeros(12, 6)}
    load(state, checkpoint_id=path)
    assert torch.equal(state["other"], torch.arange(72.0).view(12, 6))
    for name, value in expected.items():
        assert torch.equal(state["model"][name], value), name


def load_on_two_dims(path: str) -> None:
    torch.manual_seed(0)
    expected = Stack().state_dict()
    torch.manual_seed(1)
    model = parallel(Stack())
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().cpu(), expected[name].cpu()), name


def test_two_cuts_on_one_dim_are_saved_in_the_right_order(tmp_path):
    path = str(tmp_path / "saved")
    run_ranks(4, save_on_two_dims, path)
    run_ranks(1, load_plainly, path)
    run_ranks(4, load_on_two_dims, path)
