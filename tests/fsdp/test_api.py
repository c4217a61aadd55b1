"""Ten steps of a sharded model equal a single process, for each way of sharding."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from fsdp.compare import (
    OUTPUTS,
    WIDTH,
    Block,
    Model,
    adamw,
    apart,
    assert_same_parameters,
    batches,
    loss_of,
    mine,
    shard_blocks,
    train_alike,
    train_beside,
)
from ranks import device_type, run_ranks
from terrazzo.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, init_device_mesh

pytestmark = pytest.mark.on_late(both=True)

WORLDS = pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 4])


def check_resharding() -> None:
    for reshard in (None, True, False):
        train_alike(lambda model, reshard=reshard: shard_blocks(model, reshard_after_forward=reshard))


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_resharding_or_not(world):
    run_ranks(world, check_resharding)


def check_inner_mesh() -> None:
    model = train_alike(lambda model: shard_blocks(model, reshard_after_forward=2))
    block = model.blocks[0]
    with torch.enable_grad():
        block(torch.randn(2, 7, requires_grad=True))
    kept = block.up.weight
    assert isinstance(kept, DTensor) and kept.placements == (Replicate(), Shard(0))
    assert kept.to_local().shape == (5, 7) and kept.shape == (10, 7)
    expected = kept.full_tensor()
    block.reshard()
    assert block.up.weight.placements == (Shard(0),) and torch.equal(block.up.weight.full_tensor(), expected)


def test_part_of_the_ranks_keep_parameters_between_forward_and_backward():
    run_ranks(4, check_inner_mesh)


def check_placements() -> None:
    def last_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.ndim > 1 else None

    model = train_alike(lambda model: shard_blocks(model, shard_placement_fn=last_dim))
    weight = model.blocks[0].up.weight
    assert weight.placements == (Shard(1),)
    sizes = [len(c) for c in torch.arange(7).chunk(dist.get_world_size())]
    assert weight.to_local().shape == (10, sizes[dist.get_rank()])


@WORLDS
def test_any_dim_even_or_not(world):
    run_ranks(world, check_placements)


def check_hsdp() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    for reshard in (True, None):
        model = train_alike(
            lambda model, reshard=reshard: shard_blocks(model, mesh=mesh, reshard_after_forward=reshard)
        )
    assert model.embed.weight.placements == (Replicate(), Shard(0))


def test_hsdp():
    run_ranks(4, check_hsdp)


def check_replicas_alone() -> None:
    mesh = init_device_mesh(device_type(), (4, 1))
    train_alike(lambda model: shard_blocks(model, mesh=mesh))


@pytest.mark.on_late(coalesces=True)  # gloo adds four ranks' values in an order that depends on where they lie
def test_data_parallel_without_shards():
    run_ranks(4, check_replicas_alone)


def check_groups() -> None:
    def only_root(model: Model) -> None:
        fully_shard(model)

    def lists(model: Model) -> None:
        fully_shard(list(model.blocks[:2]))
        fully_shard([model.embed, model.head], reshard_after_forward=True)
        fully_shard(model)

    def nested(model: Model) -> None:
        for block in model.blocks:
            fully_shard(block.up)
            fully_shard(block)
        fully_shard(model)

    for shard in (only_root, lists, nested):
        train_alike(shard)


@WORLDS
def test_groups_of_any_shape(world):
    run_ranks(world, check_groups)


class Tied(Model):
    """Embedding and head share a weight, one block runs twice, one block's output is only sometimes used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7, bias=False)
        self.outer = nn.Linear(7, 7, bias=False)
        self.outer.weight = self.inner.weight
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.inner(self.embed(x))
        x = self.blocks[0](self.blocks[0](x))
        if self.steps % 3:
            x = self.blocks[1](x)
        return self.head(self.outer(self.blocks[2](x)))


def check_tied() -> None:
    def together(model: Tied) -> None:
        fully_shard([model.inner, model.outer])
        shard_blocks(model)

    for shard in (together, shard_blocks):
        model = train_alike(shard, make=Tied)
        assert model.inner.weight is model.outer.weight


@WORLDS
def test_shared_parameters_repeated_and_unused_modules(world):
    run_ranks(world, check_tied)


def check_frozen() -> None:
    def freeze(model: Model) -> None:
        model.embed.requires_grad_(False)
        for block in model.blocks:
            block.up.weight.requires_grad_(False)

    model = train_alike(shard_blocks, prepare=freeze)
    assert model.blocks[0].up.weight.grad is None

    # Frozen after sharding, and set free again.
    torch.manual_seed(0)
    model = shard_blocks(Model())
    x, y = next(batches(1))
    for frozen in (True, False):
        model.blocks[1].requires_grad_(not frozen)
        loss_of(model, mine(x), mine(y)).backward()
        assert (model.blocks[1].down.weight.grad is None) == frozen
        assert model.blocks[0].down.weight.grad is not None
        model.zero_grad()


def test_frozen_parameters():
    run_ranks(2, check_frozen)


def check_ignored() -> None:
    torch.manual_seed(0)
    model = Model()
    weight = model.blocks[0].up.weight
    fully_shard(model, ignored_params={weight})
    assert model.blocks[0].up.weight is weight and isinstance(model.head.weight, DTensor)
    loss_of(model, *next(batches(1))).backward()
    assert weight.grad is not None and not isinstance(weight.grad, DTensor)


def test_ignored_parameters_stay_as_they_are():
    run_ranks(2, check_ignored)


def check_dtypes() -> None:
    """Adapters in single beside frozen weights in half precision, in one group."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 5).bfloat16().requires_grad_(False)
            self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
            self.out = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.base(x.bfloat16()).float()) + self.high(self.low(x))

    model = train_alike(fully_shard, make=Adapted)
    assert model.base.weight.dtype is torch.bfloat16 and model.base.weight.grad is None


def test_dtypes_mix_in_one_group():
    run_ranks(2, check_dtypes)


def check_meta() -> None:
    torch.manual_seed(0)
    reference = Model()
    with torch.device("meta"):
        model = Model()
    shard_blocks(model)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"meta device.*embed\.weight.*to_empty"):
        model(torch.randn(2, 6))
    model.to_empty(device=device_type())
    ours = adamw(model)
    with torch.no_grad():
        for ours_, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            ours_.copy_(DTensor.from_local(theirs.detach(), ours_.device_mesh, [Replicate()]))
    assert_same_parameters(model, reference, 0)
    theirs_ = adamw(reference)
    for x, y in batches(3):
        for module, optimizer, part in ((model, ours, mine), (reference, theirs_, lambda t: t)):
            loss_of(module, part(x), part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@WORLDS
def test_from_the_meta_device(world):
    run_ranks(world, check_meta)


def check_registration() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    returned = shard_blocks(model, reshard_after_forward=True)
    assert returned is model
    assert type(model).__name__ == "FSDPModel" and isinstance(model, FSDPModule) and isinstance(model, Model)
    assert type(model.blocks[0]).__name__ == "FSDPBlock" and type(model.blocks[0].up) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == names
    seen: list[bool] = []
    model.blocks[1].up.register_forward_hook(
        lambda module, inputs, output: seen.append(isinstance(module.weight, DTensor))
    )
    model(torch.randn(2, 6))
    assert seen == [False]
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.placements == (Shard(0),)
    first = model.blocks[0]
    shards = [p.to_local() for p in first.parameters()]
    assert len({s.untyped_storage().data_ptr() for s in shards if s.numel()}) == 1, "shards are views of one buffer"
    assert_same_parameters(model, plain, 0)
    assert type(nn.Sequential(*[Block()])) is nn.Sequential


@WORLDS
def test_outside_parameters_are_dtensors_inside_they_are_plain(world):
    run_ranks(world, check_registration)


def check_several_forwards() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    (x, y), (v, w) = batches(2)
    (loss_of(model, mine(x), mine(y)) + loss_of(model, mine(v), mine(w))).backward()
    (loss_of(reference, x, y) + loss_of(reference, v, w)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x))
    model.blocks[1](torch.randn(2, 7)).detach()  # a part of the model alone
    assert model.eval()(x).shape == reference(x).shape


@WORLDS
def test_several_forwards_before_a_backward(world):
    run_ranks(world, check_several_forwards)


class Kept(list):  # type: ignore[type-arg]
    """A list with an attribute."""

    note = ""


class Made(tuple):  # type: ignore[type-arg]
    """A tuple whose constructor takes something else."""

    __slots__ = ()

    def __new__(cls, *items: Any) -> Made:
        return tuple.__new__(cls, items)


class Registered:
    """What a user has registered as a pytree of PyTorch's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


register_pytree_node(Registered, lambda value: ([value.tensor], None), lambda parts, _: Registered(*parts))


def kept(tensor: Tensor) -> Kept:
    result = Kept([tensor])
    result.note = "kept"
    return result


# How a tensor is wrapped, and how it is taken out.
CONTAINERS: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda t: deque([1, t]), lambda found: found[1]),
    (kept, lambda found: found[0] if found.note == "kept" else None),
    (lambda t: Made(t, None), lambda found: found[0] if type(found) is Made else None),
    (lambda t: {t}, lambda found: next(iter(found))),
    (lambda t: torch.return_types.max((t, t.detach())), lambda found: found.values),
    (Registered, lambda found: found.tensor if type(found) is Registered else None),
]


def check_containers() -> None:
    """Beside a tensor in a container, which the loss depends on, modules return one that it does not depend on."""

    class Containing(Block):
        def forward(self, given: Any) -> Any:
            x, out = super().forward(self.take(given)), self.wrap
            return x * 2, out(x)

    class Passing(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block.take(block(block.wrap(x))[1])
            return self.head(x)

    def make(wrap: Any, take: Any) -> Passing:
        model = Passing()
        model.blocks = nn.ModuleList([Containing(), Containing()])
        for block in model.blocks:
            block.wrap, block.take = wrap, take
        return model

    for wrap, take in CONTAINERS:
        train_alike(
            lambda m: apart(shard_blocks(m, reshard_after_forward=True)),
            make=lambda wrap=wrap, take=take: make(wrap, take),
            steps=2,
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for wrap, take in CONTAINERS:
        model = make(wrap, take)
        fully_shard(model.blocks[0], mp_policy=policy)
        assert take(model.blocks[0](wrap(torch.ones(1, 7)))[1]).dtype is torch.float64


def test_containers_that_modules_take_and_return():
    run_ranks(2, check_containers)


@dataclass
class State:
    x: Tensor
    losses: list[Tensor]
    count: int = 0


class Collecting(Block):
    """Changes a container that it is given."""

    def forward(self, state: Any) -> Any:
        if isinstance(state, State):
            state.x = super().forward(state.x)
            state.losses.append(state.x.square().mean(1, keepdim=True))
            state.count += 1
        elif isinstance(state, dict):
            state["losses"].append(state.setdefault("first", state.pop("x")).mean(1, keepdim=True))
            state["x"] = super().forward(state["losses"][-1] + state["first"])
        elif isinstance(state, deque):
            state.append(super().forward(state.popleft()) + state[-1])
        else:
            state.insert(0, super().forward(state[0]))
        return None if isinstance(state, State) else state


class WithState(Model):
    make: Any = None
    take: Any = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.make(self.embed(x))
        for block in self.blocks:
            block(state)  # what it returns is not looked at
        return self.head(self.take(state))


STATES: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda x: State(x, []), lambda state: state.x * sum(state.losses) * state.count),
    (lambda x: {"x": x, "losses": []}, lambda state: state["x"] * sum(state["losses"]) + state["first"]),
    (lambda x: [x, "end"], lambda state: sum(state[:-1]) if state[-1] == "end" else None),
    (lambda x: deque([x, x * 2]), lambda state: state[0] + state[1]),
]


def check_states() -> None:
    for make, take in STATES:

        def model(make: Any = make, take: Any = take) -> WithState:
            made = WithState()
            made.blocks = nn.ModuleList([Collecting() for _ in range(3)])
            made.make, made.take = make, take
            return made

        train_alike(lambda m: shard_blocks(m, reshard_after_forward=True), make=model, steps=2, tolerance=1e-4)


@pytest.mark.on_late(coalesces=True)  # in one unit, autograd adds the gradients of what they share in another order
def test_containers_that_modules_change():
    run_ranks(2, check_states)


class Structured(nn.Module):
    """Takes and returns more than tensors, and computes a loss that does not pass through its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 7)

    def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, object]:
        x = torch.relu(self.a(batch["x"]))
        return {"y": [self.b(x) * scale], "none": None, "constant": x.detach().sum()}


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Structured(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner({"x": x}, scale=2.0)["y"][0])


def check_structures() -> None:
    def shard(model: Wrapping) -> None:
        fully_shard(model.inner, reshard_after_forward=True)
        fully_shard(model)

    train_alike(shard, make=Wrapping)


def test_inputs_and_outputs_of_any_structure():
    run_ranks(2, check_structures)


def check_optimizers() -> None:
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        train_alike(shard_blocks, optimizer=lambda model, options=options: adamw(model, **options), steps=4)
    train_alike(shard_blocks, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), steps=4)


@WORLDS
def test_optimizers(world):
    run_ranks(world, check_optimizers)


class Words(nn.Module):
    """Reads words and says which come next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embed(x[:, 0].abs().mul(5).long().clamp(max=8))))[:, :OUTPUTS]


def check_tied_later() -> None:
    """In one group, and in two."""
    for several in (False, True):
        torch.manual_seed(0)
        model: Any = Words()
        reference = copy.deepcopy(model)
        if several:
            fully_shard(model.head)
        shard_blocks(model)
        for each in (model, reference):
            each.head.weight = each.embed.weight
        train_beside(model, reference, adamw, 4, 0.5, 1e-5)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_are_tied_after_sharding(world):
    run_ranks(world, check_tied_later)
