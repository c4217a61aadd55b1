"""State dicts across parallelisms: equal to PyTorch's own, and training goes on with the same losses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torch_sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import terrazzo.tensor
from ranks import run_ranks
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
from terrazzo.checkpoint.state_dict.tensors import broadcast_state
from terrazzo.errors import CheckpointError, CheckpointMismatchError

FULL = StateDictOptions(full_state_dict=True)
BATCH = 8


class Block(nn.Module):
    """Two linears whose sizes do not divide by the number of ranks, unless `tp` asks for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x) * self.scale)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


# ------------------------------------------------------------------ parallelisms: model -> wrapped model, ranks of data


def plain(model: Net) -> nn.Module:
    return model


def ddp(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_inside_compile(model: Net) -> nn.Module:
    model.blocks[0] = torch.compile(checkpoint_wrapper(model.blocks[0]), backend="eager")
    return DistributedDataParallel(model)


def fsdp2(model: Net) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def fsdp2_checkpointed(model: Net) -> nn.Module:
    for i in range(len(model.blocks)):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i])
    return fsdp2(model)


def tensor_parallel(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp2_and_tensor_parallel(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def hybrid_fsdp2(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: Net) -> nn.Module:
    cpu = torch.device("cpu")
    for i in range(len(model.blocks)):
        model.blocks[i] = FullyShardedDataParallel(model.blocks[i], use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)


def fsdp1_flat(model: Net) -> nn.Module:
    # a flat parameter cannot mix frozen and trainable ones
    cpu = torch.device("cpu")
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], device_id=cpu)
    model.frozen = FullyShardedDataParallel(model.frozen, device_id=cpu)
    return FullyShardedDataParallel(model, device_id=cpu)


def data_rank(parallelism: Callable[[Net], nn.Module]) -> tuple[int, int]:
    """Which part of the batch this rank trains on, of how many."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if parallelism in (plain, tensor_parallel):
        return 0, 1
    return (rank // (world // 2), 2) if parallelism is fsdp2_and_tensor_parallel else (rank, world)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def build(parallelism: Any, make: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = parallelism(net(seed))
        return model, make(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parallelism: Any, steps: int, seed: int) -> list[float]:
    """The loss over the whole batch at each step, however the batch is divided."""
    generator = torch.Generator().manual_seed(seed)
    part, parts = data_rank(parallelism)
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, 4, generator=generator).chunk(parts)[part]
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and set(actual) == set(expected), (where, set(actual) ^ set(expected))
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    elif isinstance(expected, DTensor):
        assert isinstance(actual, DTensor) and actual.placements == expected.placements, where
        assert torch.equal(actual.to_local(), expected.to_local()), where
    elif hasattr(expected, "local_shards"):
        ours, theirs = actual.local_shards(), expected.local_shards()
        assert [s.metadata for s in ours] == [s.metadata for s in theirs], where
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(ours, theirs, strict=True)), where
    elif isinstance(expected, torch.Tensor):
        assert type(actual) in (torch.Tensor, type(expected)), where
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def of_world(world: int) -> list[Any]:
    general = [ddp, ddp_inside_compile, fsdp2, fsdp2_checkpointed, tensor_parallel, fsdp1, fsdp1_flat]
    return general if world == 2 else [fsdp2, tensor_parallel, fsdp2_and_tensor_parallel, hybrid_fsdp2]


# ------------------------------------------------------------------ against torch's own


CHOICES: list[dict[str, bool]] = [
    {},
    {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    {"full_state_dict": True},
    {"cpu_offload": True},
    {"full_state_dict": True, "cpu_offload": True},
]


def check_against_torch(parallelism: Any, make: Any, choices: list[dict[str, bool]]) -> None:
    model, optimizer = build(parallelism, make)
    train(model, optimizer, parallelism, steps=2, seed=1)
    for choice in choices:
        ours = get_state_dict(model, optimizer, options=StateDictOptions(**choice))
        offloaded = choice.get("full_state_dict") and choice.get("cpu_offload")
        if offloaded and dist.get_rank() > 0:
            assert ours == ({}, {})
        if offloaded and parallelism in (fsdp1, fsdp1_flat):
            choice = {"full_state_dict": True}  # on the CPU torch's own crashes when told to offload
        theirs = torch_sd.get_state_dict(model, optimizer, options=torch_sd.StateDictOptions(**choice))
        if not offloaded or dist.get_rank() == 0:
            assert_same(ours[0], theirs[0], f"{choice} model")
            assert_same(ours[1], theirs[1], f"{choice} optimizer")


def test_equal_to_torchs_own_of_fully_shard() -> None:
    run_ranks(4, check_against_torch, fsdp2, adamw, CHOICES)


def test_equal_to_torchs_own_of_others() -> None:
    for parallelism in (tensor_parallel, fsdp2_and_tensor_parallel, hybrid_fsdp2):
        run_ranks(4, check_against_torch, parallelism, adamw, CHOICES[:2])


@pytest.mark.long
@pytest.mark.parametrize(("world", "make"), [(2, adamw), (4, adamw), (4, sgd)])
def test_equal_to_torchs_own_in_every_way(world: int, make: Any) -> None:
    for parallelism in of_world(world):
        if parallelism is fsdp1_flat and make is sgd:
            continue  # torch cannot represent frozen flat parameters in an optimizer
        run_ranks(world, check_against_torch, parallelism, make, CHOICES)


# ------------------------------------------------------------------ across parallelisms


def full_state_after_two_steps(parallelism: Any, make: Any) -> Any:
    model, optimizer = build(parallelism, make)
    losses = train(model, optimizer, parallelism, steps=2, seed=1)
    return losses, copy.deepcopy(get_state_dict(model, optimizer, options=FULL))


def losses_after(parallelism: Any, make: Any, states: Any, options: StateDictOptions) -> list[float]:
    model, optimizer = build(parallelism, make, seed=3)
    others = ({}, {}) if parallelism is plain else (None, None)  # both say that there is nothing
    weights, state = states if dist.get_rank() == 0 or not options.broadcast_from_rank0 else others
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    assert_same(get_state_dict(model, optimizer, options=FULL)[0], states[0])
    return train(model, optimizer, parallelism, steps=2, seed=2)


@pytest.mark.long  # test_what_one_parallelism_saves_another_loads does a part of it
@pytest.mark.parametrize("make", [adamw, sgd])
def test_training_goes_on_under_another_parallelism(make: Any) -> None:
    """With every parallelism, and both ways to set the state of each."""

    def usable(parallelism: Any) -> bool:
        return not (parallelism is fsdp1_flat and make is sgd)

    ways = [FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)]

    ((first, states),) = run_ranks(1, full_state_after_two_steps, plain, make)
    (expected,) = run_ranks(1, losses_after, plain, make, states, FULL)
    for world in (2, 4):
        for parallelism in filter(usable, of_world(world)):
            losses, saved = run_ranks(world, full_state_after_two_steps, parallelism, make)[0]
            assert losses == pytest.approx(first, rel=1e-5)
            (resumed,) = run_ranks(1, losses_after, plain, make, saved, FULL)
            assert resumed == pytest.approx(expected, rel=1e-4), parallelism
            for options in ways:
                for resumed in run_ranks(world, losses_after, parallelism, make, states, options):
                    assert resumed == pytest.approx(expected, rel=1e-4), (parallelism, options)


def sharded_round_trip(parallelism: Any, make: Any, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(parallelism, make)
    train(model, optimizer, parallelism, steps=2, seed=1)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    expected = train(model, optimizer, parallelism, steps=2, seed=2)
    resumed = build(parallelism, make, seed=3)
    set_state_dict(*resumed, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    assert train(*resumed, parallelism, steps=2, seed=2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sharded_state_goes_round(world: int) -> None:
    for parallelism in of_world(world):
        for flat in (False, True):
            run_ranks(world, sharded_round_trip, parallelism, adamw, flat)


def check_before_first_step(parallelism: Any, make: Any) -> None:
    """Reading state before any step gives every entry and leaves training as it would have been."""
    reference = build(parallelism, make)
    expected = train(*reference, parallelism, steps=2, seed=1)
    model, optimizer = build(parallelism, make)
    states = copy.deepcopy(get_state_dict(model, optimizer))
    assert set(states[1]["state"]) == set(get_optimizer_state_dict(*reference)["state"])
    assert train(model, optimizer, parallelism, steps=2, seed=1) == expected
    resumed = build(parallelism, make, seed=4)
    set_state_dict(*resumed, model_state_dict=states[0], optim_state_dict=states[1])
    assert train(*resumed, parallelism, steps=2, seed=1) == expected


def test_before_the_first_step() -> None:
    for parallelism in of_world(2):
        run_ranks(2, check_before_first_step, parallelism, adamw)


# ------------------------------------------------------------------ particular cases


def check_other_layouts() -> None:
    """A dict may be distributed otherwise than the model, on its mesh or another, or not at all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    square = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(40.0).reshape(8, 5)
    target = nn.Module()
    for given in (
        whole,
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole, square, [Shard(1), Shard(0)]),
    ):
        for placements in ([Shard(0)], [Shard(1)]):
            target.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 5), mesh, placements))
            set_model_state_dict(target, {"weight": given})
            assert target.weight.placements == tuple(placements)
            assert torch.equal(target.weight.full_tensor(), whole)
        target.weight = nn.Parameter(torch.zeros(8, 5))
        set_model_state_dict(target, {"weight": given})
        assert torch.equal(target.weight, whole)


def test_other_layouts() -> None:
    run_ranks(4, check_other_layouts)


def check_uneven(dtype: torch.dtype) -> None:
    """Three rows and one row over four ranks: some ranks hold nothing."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)
    expected = copy.deepcopy(reference.state_dict())
    model = fully_shard(copy.deepcopy(reference))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    before = get_model_state_dict(model, options=FULL)
    assert_same(before, dict(expected))
    optimizer.step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        other = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype))
        fresh = torch.optim.AdamW(other.parameters())
        mine = dist.get_rank() == 0 or not broadcast
        set_state_dict(
            other,
            fresh,
            model_state_dict=weights if mine else {},
            optim_state_dict=state if mine else {},
            options=options,
        )
        assert_same(get_state_dict(other, fresh, options=FULL), (weights, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_and_empty_shards(dtype: torch.dtype) -> None:
    run_ranks(4, check_uneven, dtype)


def check_meta() -> None:
    expected = net().state_dict()
    for broadcast in (False, True):
        with torch.device("meta"):
            model = Net()
        fsdp2(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, expected if dist.get_rank() == 0 or not broadcast else {}, options=options)
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        assert_same(get_model_state_dict(model, options=FULL), dict(expected))
        model(torch.ones(2, 4)).sum().backward()


def test_meta_models_are_materialised_from_rank_0() -> None:
    run_ranks(2, check_meta)


def check_after_evaluation() -> None:
    """After a forward pass without backward FSDP2's root is still gathered."""
    model, optimizer = build(fsdp2, adamw)
    train(model, optimizer, fsdp2, steps=1, seed=1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    state = get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
    set_optimizer_state_dict(model, optimizer, state)
    with torch.no_grad():
        model(torch.ones(2, 4))
    zeros = {k: torch.zeros_like(v) for k, v in net().state_dict().items()}
    set_model_state_dict(model, zeros, options=FULL)
    assert not any(p.full_tensor().any() for p in model.parameters())


def test_after_evaluation() -> None:
    run_ranks(2, check_after_evaluation)


def check_broadcast_errors() -> None:
    """What rank 0 holds wrongly, and what does not fit, is an error on every rank."""
    model, optimizer = build(fsdp2, adamw)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    root = dist.get_rank() == 0
    sharded = get_model_state_dict(model)
    with pytest.raises(CheckpointError, match="it is distributed"):
        set_model_state_dict(model, sharded if root else {}, options=options)
    weights = get_model_state_dict(model, options=FULL)
    weights["head.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=r"head\.weight.*\(2, 2\)"):
        set_model_state_dict(model, weights if root else {}, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    state["state"]["head.bias"]["exp_avg"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"state\.head\.bias\.exp_avg.*\(7,\)"):
        set_optimizer_state_dict(model, optimizer, state if root else {}, options=options)
    del weights["head.weight"]
    with pytest.raises(CheckpointError, match=r"missing \['head\.weight'\]"):
        set_model_state_dict(model, weights if root else {}, options=options)


def check_other_errors() -> None:
    def fail() -> dict[str, Any]:
        raise ArithmeticError("no state")

    def refuse(path: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")
        return whole

    with pytest.raises(ArithmeticError, match="no state"):
        broadcast_state(fail, refuse)
    with pytest.raises(CheckpointError, match=r"rank 1: RuntimeError\('no memory'\)"):
        broadcast_state(lambda: {"a": torch.ones(2), "b": torch.ones(3)}, refuse)


def test_broadcast_errors_reach_every_rank() -> None:
    run_ranks(2, check_broadcast_errors)
    run_ranks(2, check_other_errors)


def check_stages() -> Any:
    """Two pipeline stages merge their flattened optimizer state; a stage takes its part of the whole."""
    stage = dist.get_rank()
    whole = net()
    mine = nn.ModuleDict({"blocks": nn.ModuleDict({str(stage): whole.blocks[stage]})})
    optimizer = torch.optim.AdamW([{"params": list(mine.parameters()), "lr": 0.1 + stage}])
    flat = get_optimizer_state_dict(mine, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    every: list[Any] = [None, None]
    dist.all_gather_object(every, flat)
    merged = every[0] | every[1]
    optimizer.param_groups[0]["lr"] = 9.0
    with pytest.raises(CheckpointError, match="unexpected"):
        set_optimizer_state_dict(mine, optimizer, merged)
    set_optimizer_state_dict(mine, optimizer, merged, options=StateDictOptions(strict=False))
    assert optimizer.param_groups[0]["lr"] == 0.1 + stage
    complete = nn.ModuleDict({"blocks": whole.blocks})
    both = [list(block.parameters()) for block in whole.blocks]
    joined = torch.optim.AdamW([{"params": both[1]}, {"params": both[0]}])
    set_optimizer_state_dict(complete, joined, merged)
    assert [group["lr"] for group in joined.param_groups] == [1.1, 0.1]


def test_pipeline_stages_merge_flattened_state() -> None:
    run_ranks(2, check_stages)


# ------------------------------------------------------------------ terrazzo's own distributed tensors


def own_tensors(seed: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    for module in model:
        for name, param in list(module.named_parameters(recurse=False)):
            placements = [terrazzo.tensor.Shard(dim if param.dim() > 1 else 0)]
            sharded = terrazzo.tensor.distribute_tensor(param.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(sharded))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train_own(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(2):
        x = torch.randn(8, 4, generator=generator)
        loss = model(terrazzo.tensor.distribute_tensor(x, mesh, [terrazzo.tensor.Replicate()])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
    return losses


def check_own_tensors() -> None:
    model, optimizer = own_tensors(0, 0)
    first = train_own(model, optimizer, seed=1)
    sharded = copy.deepcopy(get_state_dict(model, optimizer))
    whole = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    assert isinstance(sharded[0]["0.weight"], terrazzo.tensor.DTensor) and type(whole[0]["0.weight"]) is torch.Tensor
    expected = train_own(model, optimizer, seed=2)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for states, options in ((sharded, StateDictOptions()), (whole, FULL), (whole, broadcast)):
        for dim in (0, 1):
            resumed = own_tensors(5, dim)
            weights, state = copy.deepcopy(states) if dist.get_rank() == 0 or options is not broadcast else ({}, {})
            set_state_dict(*resumed, model_state_dict=weights, optim_state_dict=state, options=options)
            assert train_own(*resumed, seed=2) == pytest.approx(expected, rel=1e-5)
    # What rank 0 refuses is refused on all ranks.
    misfit = {"state": {9: {}}, "param_groups": [{"params": [0, 1, 2]}]} if dist.get_rank() == 0 else {}
    with pytest.raises(CheckpointMismatchError, match="groups of the optimizer state dict have"):
        set_state_dict(*resumed, model_state_dict=weights, optim_state_dict=misfit, options=broadcast)
    fresh = own_tensors(0, 1)
    get_state_dict(*fresh)
    assert train_own(*fresh, seed=1) == pytest.approx(first, rel=1e-5)


def test_terrazzos_own_distributed_tensors() -> None:
    for world in (2, 4):
        run_ranks(world, check_own_tensors)


# ------------------------------------------------------------------ through checkpoints


def save_after_two_steps(parallelism: Any, path: str) -> None:
    model, optimizer = build(parallelism, adamw)
    train(model, optimizer, parallelism, steps=2, seed=1)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optim": state}, checkpoint_id=path)


def load_and_go_on(parallelism: Any, path: str) -> list[float]:
    model, optimizer = build(parallelism, adamw, seed=3)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optim": state}
    load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    return train(model, optimizer, parallelism, steps=2, seed=2)


@pytest.mark.long
def test_what_one_parallelism_saves_another_loads(tmp_path: Any) -> None:
    """Sharded state goes through a checkpoint, before the loader's first step, and training goes on the same."""
    cases = [(1, plain), (2, ddp), (2, fsdp1), (2, fsdp2), (4, fsdp2_and_tensor_parallel), (4, hybrid_fsdp2)]
    for world, parallelism in cases:
        run_ranks(world, save_after_two_steps, parallelism, str(tmp_path / parallelism.__name__))
    (expected,) = run_ranks(1, load_and_go_on, plain, str(tmp_path / "plain"))
    for world, parallelism in cases:
        for source in ("plain", "fsdp1", "fsdp2", "fsdp2_and_tensor_parallel"):
            for losses in run_ranks(world, load_and_go_on, parallelism, str(tmp_path / source)):
                assert losses == pytest.approx(expected, rel=1e-4), (source, parallelism)
