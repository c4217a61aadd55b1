"""State dicts of modules that our fully_shard sharded: those of one process, whatever the parallelism, and from one
parallelism into another training goes on with the same losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_sd
from torch.nn.parallel import DistributedDataParallel

from fsdp.compare import INPUTS, OUTPUTS, WIDTH, Block, batches, loss_of, whole
from ranks import device_type, run_fresh, run_ranks
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from terrazzo.errors import CheckpointError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Shard, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late

FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """Sizes that divide by nothing, a shared weight, frozen parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer.weight = self.inner.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 2.0]))
        self.blocks[0].norm.requires_grad_(False)
        self.embed.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.outer(x)) * self.scale


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def parallel_too(model: Any) -> Any:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"])


def of_torch(model: Any) -> Any:
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    return torch_fsdp.fully_shard(model)


PARALLELISMS: dict[str, Any] = {
    "plain": lambda model: model,
    "blocks": sharded,
    "last dim": lambda model: sharded(model, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    "root": fully_shard,
    "replicated shards": lambda model: sharded(model, mesh=init_device_mesh(device_type(), (2, 2))),
    "with tensor parallelism": parallel_too,
    "ddp": DistributedDataParallel,
    "torch's fully_shard": of_torch,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Weights and the rest in groups of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, nesterov=True)


def build(kind: str, make: Any, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = PARALLELISMS[kind](Net())
    return model, make(model)


def train(kind: str, model: Any, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> list[float]:
    """The loss over the whole batch at each step, however the batch is divided."""
    world, rank = dist.get_world_size(), dist.get_rank()
    part, parts = rank, world
    if kind == "plain":
        part, parts = 0, 1
    elif kind == "with tensor parallelism":
        part, parts = rank // 2, world // 2
    losses = []
    for x, y in batches(steps, seed, ranks=12):
        size = len(x) // parts
        mine = slice(part * size, (part + 1) * size)
        loss = loss_of(model, x[mine], y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def assert_close(actual: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), (where, actual.keys() ^ expected.keys())
        for key in expected:
            assert_close(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_close(*pair, f"{where}.{i}")
    elif isinstance(expected, Tensor):
        found = whole(actual).to(expected.device)  # from the CPU, if the state was to be there
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5, msg=f"{where} differs")
    else:
        assert actual == expected, where


# ------------------------------------------------------------------ what the getters give


def check_getters(kind: str, make: Any) -> None:
    model, optimizer = build(kind, make)
    reference, theirs = build("plain", make)
    assert train(kind, model, optimizer, 1) == pytest.approx(train("plain", reference, theirs, 1), rel=1e-5)
    # PyTorch's own functions, on one process.
    weights = torch_sd.get_model_state_dict(reference)
    state = torch_sd.get_optimizer_state_dict(reference, theirs)

    full = get_model_state_dict(model, options=FULL)
    assert all(type(value) is Tensor for value in full.values())
    assert_close(full, weights)
    assert_close(get_optimizer_state_dict(model, optimizer, options=FULL), state)
    assert_close(get_state_dict(model, optimizer, options=FULL), (weights, state))

    parts = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for name, value in parts.items() if name != "scale")
    assert_close(parts, weights)
    assert_close(get_optimizer_state_dict(model, optimizer), state)

    on_one = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_state_dict(model, optimizer, options=on_one)
    assert_close(found, (weights, state) if dist.get_rank() == 0 else ({}, {}))

    trained = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    ignoring = torch_sd.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    without = torch_sd.get_model_state_dict(reference, options=ignoring)
    assert weights.keys() - without.keys() == {"embed.bias", "blocks.0.norm.weight", "blocks.0.norm.bias"}
    assert_close(get_model_state_dict(model, options=trained), without)

    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flattened = torch_sd.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    expected = torch_sd.get_optimizer_state_dict(reference, theirs, options=flattened)
    assert_close(get_optimizer_state_dict(model, optimizer, options=flat), expected)

    block = get_model_state_dict(
        model.blocks[1], options=StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
    )
    assert_close(block, {n[9:]: value for n, value in weights.items() if n.startswith("blocks.1.")})


def check_setters(kind: str, make: Any) -> None:
    reference, theirs = build("plain", make)
    train("plain", reference, theirs, 1)
    weights, state = torch_sd.get_state_dict(reference, theirs)
    weights, state = copy.deepcopy((weights, state))
    expected = train("plain", reference, theirs, 2)
    flat = copy.deepcopy(
        torch_sd.get_optimizer_state_dict(
            *build_and_load(weights, state, make),
            options=torch_sd.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        )
    )
    here = dist.get_rank() == 0
    ways: list[tuple[StateDictOptions, Any, Any]] = [
        (FULL, weights, state),
        (
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            weights if here else {},
            state if here else {},
        ),
        (StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True), weights, flat),
    ]
    for options, model_state, optimizer_state in ways:
        model, optimizer = build(kind, make, seed=9)
        missing = set_model_state_dict(model, copy.deepcopy(model_state), options=options)
        assert not missing.missing_keys and not missing.unexpected_keys
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizer_state), options=options)
        parts = get_state_dict(model, optimizer)
        assert train(kind, model, optimizer, 2) == pytest.approx(expected, rel=1e-5)
        other, other_optimizer = build(kind, make, seed=8)
        # Those parts were live: they have gone on with the model.
        set_state_dict(other, other_optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
        assert_close(get_model_state_dict(other, options=FULL), get_model_state_dict(model, options=FULL))

    less = {name: value for name, value in weights.items() if name != "head.bias"}
    model, optimizer = build(kind, make, seed=9)
    with pytest.raises((CheckpointError, RuntimeError, KeyError), match=r"head\.bias"):
        set_model_state_dict(model, copy.deepcopy(less), options=FULL)
    before = whole(model.head.bias).clone()
    lenient = StateDictOptions(full_state_dict=True, strict=False)
    found = set_model_state_dict(model, copy.deepcopy(less), options=lenient)
    assert list(found.missing_keys) == ["head.bias"] and torch.equal(whole(model.head.bias), before)
    assert_close(get_model_state_dict(model, options=FULL) | {"head.bias": 0}, less | {"head.bias": 0})


def build_and_load(weights: Any, state: Any, make: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = build("plain", make, seed=3)
    torch_sd.set_state_dict(
        model, optimizer, model_state_dict=copy.deepcopy(weights), optim_state_dict=copy.deepcopy(state)
    )
    return model, optimizer


WAYS = {2: ("blocks", "last dim"), 4: ("blocks", "replicated shards", "with tensor parallelism")}


def check_all(check: Any, make: Any) -> None:
    for kind in WAYS[dist.get_world_size()]:
        check(kind, make)


@pytest.mark.parametrize(
    ("world", "make"), [(2, adamw), *(pytest.param(4, make, marks=pytest.mark.long) for make in (adamw, sgd))]
)
@pytest.mark.parametrize("check", [check_getters, check_setters])
def test_like_one_process(world, check, make):
    run_ranks(world, check_all, check, make)


# ------------------------------------------------------------------ from one parallelism into another


def save_after_two_steps(kind: str, path: str) -> None:
    for make in (adamw, sgd):
        model, optimizer = build(kind, make)
        train(kind, model, optimizer, 1)
        weights, state = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/{make.__name__}")


def load_and_go_on(kind: str, path: str) -> list[list[float]]:
    losses = []
    for make in (adamw, sgd):
        model, optimizer = build(kind, make, seed=9)
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        load(loaded, checkpoint_id=f"{path}/{make.__name__}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        losses.append(train(kind, model, optimizer, 2))
    return losses


def uninterrupted() -> list[list[float]]:
    losses = []
    for make in (adamw, sgd):
        model, optimizer = build("plain", make)
        train("plain", model, optimizer, 1)
        losses.append(train("plain", model, optimizer, 2))
    return losses


@pytest.mark.parametrize(
    ("world", "kind", "others"),
    [
        (
            4,
            "with tensor parallelism",
            [(1, "plain"), (1, "blocks"), (2, "torch's fully_shard"), (2, "last dim"), (4, "replicated shards")],
        ),
        (2, "ddp", [(4, "replicated shards"), (2, "blocks")]),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                (4, "blocks", [(2, "root"), (3, "last dim"), (4, "with tensor parallelism")]),
                (4, "replicated shards", [(2, "ddp"), (4, "torch's fully_shard")]),
                (2, "torch's fully_shard", [(4, "with tensor parallelism"), (2, "blocks")]),
            ]
        ),
    ],
)
def test_training_goes_on_under_another_parallelism(tmp_path, world, kind, others):
    path = str(tmp_path)
    expected = run_ranks(1, uninterrupted)[0]
    run_ranks(world, save_after_two_steps, kind, path)
    for other_world, other in others:
        if other_world == 3:
            found = [outcome.value for outcome in run_fresh(3, load_and_go_on, other, path) if outcome.ok]
            assert len(found) == 3
        else:
            found = run_ranks(other_world, load_and_go_on, other, path)
        for losses in found:
            for a, b in zip(losses, expected, strict=True):
                assert a == pytest.approx(b, rel=1e-5), (kind, other)
