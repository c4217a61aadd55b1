"""Small groups in one message: the same numbers, bit for bit, as when each goes alone, in fewer messages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.compare import Block, Counted, Model, adamw, apart, batches, checked, loss_of, mine, shard_blocks
from fsdp.plan_checker import PlanError, check, plan_steps
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, explain, fully_shard, report
from terrazzo.fsdp.plan.operations import Kind
from terrazzo.fsdp.plan.units import Spec, UnitSpec
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late

BLOCKS = 5


class Wandering(Model):
    """Uses blocks in another order, several times or not at all, as the step says."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)
        self.ways = [[0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [0, 1, 1, 2], [3], [0, 1, 2, 3, 4]]
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in self.ways[self.step % len(self.ways)]:
            x = self.blocks[i](x)
        return self.head(x)


class Recomputing(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Branching(Model):
    """Ranks use different parameters of a block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = y if (i + dist.get_rank()) % 2 else x + 0 * y.sum() if i % 3 else y
        return self.head(x)


class Box:
    """An object in which nobody looks for tensors."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Boxing(Block):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Boxed(Model):
    """Backward comes to the first block without notice, and to the others not at all: it has to stay unsharded."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)
        self.blocks[0] = Boxing()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        box = self.blocks[0](x)
        for block in self.blocks[1:]:
            block(x)
        return self.head(box.inside)


def plainly(model: Any, x: Tensor, y: Tensor, step: int) -> None:
    loss_of(model, x, y).backward()


def by_hand(model: Any, x: Tensor, y: Tensor, step: int) -> None:
    """Gathers and frees groups in the midst of others that go together with them."""
    first, second, third = model.blocks[0], model.blocks[1], model.blocks[2]
    handle = third.unshard(async_op=True)
    first.unshard()
    loss = loss_of(model, x, y)
    second.unshard()
    second.reshard()
    handle.wait()
    loss.backward()
    if step % 2:
        model.blocks[-1].unshard()
        with torch.no_grad():
            model(x)


def accumulating(model: Any, x: Tensor, y: Tensor, step: int) -> None:
    model.set_requires_gradient_sync(False)
    loss_of(model, x[:2], y[:2]).backward()
    model.blocks[1].set_requires_gradient_sync(step % 2 == 0)  # one of them goes its own way
    loss_of(model, x[2:], y[2:]).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, x, y).backward()


def replicas_later(model: Any, x: Tensor, y: Tensor, step: int) -> None:
    model.set_requires_all_reduce(False)
    loss_of(model, x[:2], y[:2]).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, x, y).backward()


def twice(model: Any, x: Tensor, y: Tensor, step: int) -> None:
    """Two forwards before their backwards; and a failure."""
    (loss_of(model, x[:2], y[:2]) + loss_of(model, x[2:], y[2:])).backward()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 99))


def frozen_in_part(model: Any) -> None:
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    model.blocks[3].half()
    model.blocks[3].requires_grad_(False)


class WithHalf(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            x = block(x.half()).float() if i == 3 else block(x)
        return self.head(x)


def assert_same_bits(
    make: Callable[[], Any],
    bounds: tuple[int, ...],
    step: Callable[..., None] = plainly,
    prepare: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> list[int]:
    """Trains one model in which groups go alone and others in which they go together; returns how many messages."""
    torch.manual_seed(0)
    original = make()
    prepare(original)
    counts, found = [], []
    for bound in (0, *bounds):
        model = copy.deepcopy(original)
        shard_blocks(model, **options)
        model.set_coalesce_bytes(bound)
        optimizer = adamw(model)
        with checked(model), Counted() as kinds:
            for i, (x, y) in enumerate(batches(10)):
                model.step = i
                step(model, mine(x), mine(y), i)
                optimizer.step()
                optimizer.zero_grad()
        counts.append(len(kinds))
        found.append([value.to_local() for value in model.state_dict().values()])
    for others in found[1:]:
        for ours, alone in zip(others, found[0], strict=True):
            assert torch.equal(ours, alone)
    return counts


def check_ways() -> None:
    some = partial(Model, BLOCKS)
    bounds = (1500, 1 << 20)
    ways: list[dict[str, Any]] = [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy()},
    ]
    if dist.get_world_size() == 4:
        ways.append({"mesh": init_device_mesh(device_type(), (2, 2))})
    for options in ways:
        alone, in_part, all_at_once = assert_same_bits(some, bounds, **options)
        assert alone > in_part > all_at_once, options


def check_users() -> None:
    bounds = (1500, 1 << 20)
    for step in (by_hand, accumulating, twice):
        assert_same_bits(partial(Model, BLOCKS), bounds, step)
    if dist.get_world_size() == 4:
        assert_same_bits(partial(Model, BLOCKS), bounds, replicas_later, mesh=init_device_mesh(device_type(), (2, 2)))
        assert_same_bits(partial(Model, BLOCKS), bounds, reshard_after_forward=2)


def check_models() -> None:
    bounds = (1500, 1 << 20)
    for make in (Wandering, partial(Recomputing, BLOCKS), partial(Branching, BLOCKS), Boxed):
        assert_same_bits(make, bounds)
    assert_same_bits(partial(WithHalf, BLOCKS), bounds, prepare=frozen_in_part)


def with_whole_shards() -> dict[str, Any]:
    """Options for one rank, or for replicas that shard nothing: parameters are used where the shards are."""
    world = dist.get_world_size()
    return {"mesh": init_device_mesh(device_type(), (world, 1))} if world > 1 else {}


def check_users_of_whole_shards() -> None:
    world, bounds, options = dist.get_world_size(), (1500, 1 << 20), with_whole_shards()
    alone, in_part, all_at_once = assert_same_bits(partial(Model, BLOCKS), bounds, **options)
    assert alone > in_part > all_at_once if world > 1 else alone == 0
    for step in (by_hand, accumulating, twice):
        assert_same_bits(partial(Model, BLOCKS), bounds, step, **options)


def check_models_of_whole_shards() -> None:
    bounds, options = (1500, 1 << 20), with_whole_shards()
    for make in (Wandering, partial(Recomputing, BLOCKS), partial(Branching, BLOCKS), Boxed):
        assert_same_bits(make, bounds, **options)
    assert_same_bits(partial(WithHalf, BLOCKS), bounds, prepare=frozen_in_part, **options)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", [check_users_of_whole_shards, check_models_of_whole_shards])
def test_groups_whose_shards_are_whole_go_together(world, what):
    run_ranks(world, what)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "what", [*(pytest.param(f, marks=pytest.mark.long) for f in (check_ways, check_users)), check_models]
)
def test_numbers_are_those_of_groups_that_go_alone(world, what):
    run_ranks(world, what)


# ------------------------------------------------------------------ what is said of it


def check_said() -> None:
    model = shard_blocks(Model(), reshard_after_forward=True)
    assert report(model).coalesce_bytes == 4 << 20
    assert [group.together for group in report(model).groups] == [("Model", "blocks.0", "blocks.1", "blocks.2")]
    assert "in one message, up to 4.0 MiB: Model, blocks.0, blocks.1, blocks.2" in str(report(model))
    assert "Model and 3 more" in str(explain(model))
    gathers = [each for each in explain(model).operations if each.kind is Kind.GATHER]
    assert [each.unit for each in gathers] == [0, 0]
    assert "in one message" not in str(report(apart(model)))
    deep = shard_blocks(Model(12), reshard_after_forward=True)
    more = report(deep).peak
    assert report(apart(deep)).peak < more, "two groups at a time, and no more"
    with pytest.raises(FSDPValueError, match="nbytes must be a number of bytes, 0 or more, not -1"):
        model.set_coalesce_bytes(-1)
    # Only neighbours that nobody has set anything of their own for.
    other = nn.Sequential(*[nn.Linear(7, 7) for _ in range(4)])
    for layer in other:
        fully_shard(layer)
    fully_shard(other)
    other[1].set_all_reduce_hook(lambda reduced: None)
    assert [group.together for group in report(other).groups] == [("0",), ("1",), ("2", "3")]

    # A slice of a mesh is another object each time.
    mesh = init_device_mesh(device_type(), (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    sliced = nn.Sequential(*[nn.Linear(7, 7) for _ in range(2)])
    for layer in sliced:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(sliced, mesh=mesh["dp"])
    assert [group.together for group in report(sliced).groups] == [("0", "1")]


@pytest.mark.on_late(coalesces=True)
def test_the_report_and_the_plan_say_what_goes_together():
    run_ranks(2, check_said)


def check_said_alone() -> None:
    model = shard_blocks(Model(), reshard_after_forward=True)
    assert [group.together for group in report(model).groups] == [("Model", "blocks.0", "blocks.1", "blocks.2")]


@pytest.mark.on_late(coalesces=True)
def test_the_report_says_what_goes_together_on_one_rank():
    run_ranks(1, check_said_alone)


def check_parting() -> None:
    """A module leaves its unit before a forward, and only there."""
    torch.manual_seed(0)
    model = Model(4)
    reference = copy.deepcopy(model)
    shard_blocks(model)
    x, y = next(batches(1))
    loss = loss_of(model, mine(x), mine(y))
    model.blocks[1].set_requires_gradient_sync(False)
    words = "'blocks.0', 'blocks.1', 'blocks.2', ... were changed between a forward and its backward"
    with pytest.raises(FSDPError, match=words):
        loss.backward()
    assert len(report(model).groups) == 4, "the root, and the blocks in three parts"
    loss = loss_of(model, mine(x), mine(y))
    loss.backward(retain_graph=True)
    assert model.blocks[0].up.weight.grad is not None and model.blocks[1].up.weight.grad is None
    model.set_requires_gradient_sync(True)
    model.blocks[3].set_requires_gradient_sync(False)
    loss_of(model, mine(x), mine(y)).backward()
    with pytest.raises(FSDPError, match="a second backward ran through a forward after which settings"):
        loss.backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    for _ in range(2):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    # Gradients of one module are dropped, those of its neighbours are not.
    model = shard_blocks(Model())
    model.set_requires_gradient_sync(False)
    loss_of(model, mine(x), mine(y)).backward()
    model.blocks[1].zero_grad()
    model.reduce_gradients()
    assert [block.up.weight.grad is None for block in model.blocks] == [False, True, False]

    # What refers to shards does so when a unit is parted, too.
    model = shard_blocks(Model())
    state, locals_ = model.state_dict(), [p.to_local() for p in model.parameters()]
    optimizer = adamw(model)
    for hooked in (False, True):
        if hooked:
            model.blocks[1].set_all_reduce_hook(lambda reduced: None)
        loss_of(model, mine(x), mine(y)).backward()
        optimizer.step()
        assert len(report(model).groups) == (4 if hooked else 2)
        for (name, p), local in zip(model.named_parameters(), locals_, strict=True):
            assert torch.equal(state[name].to_local(), p.to_local()) and torch.equal(local, p.to_local()), name

    # One of them gets another dtype.
    model = shard_blocks(Model())
    model(x)
    model.blocks[1].double()
    model.blocks[1].register_forward_pre_hook(lambda module, args: args[0].double())
    model.blocks[1].register_forward_hook(lambda module, args, out: out.float())
    loss_of(model, mine(x), mine(y)).backward()
    assert len(report(model).groups) == 2
    assert [block.up.weight.grad.dtype for block in model.blocks] == [torch.float32, torch.float64, torch.float32]


@pytest.mark.on_late(coalesces=True)
def test_a_module_leaves_its_unit():
    run_ranks(2, check_parting)


def each_with(modules: int) -> tuple[int, ...]:
    """The unit of each module, if three units have so many."""
    return tuple(unit for unit in range(3) for _ in range(modules))


@pytest.mark.parametrize("streams", [False, True])
def test_plans_are_free_of_races(streams):
    from fsdp.test_plan import SETTINGS, SIZES

    for settings in SETTINGS:
        for modules in (2, 3):
            units = tuple(UnitSpec(name, SIZES, **settings) for name in "abc")
            spec = Spec(units, streams, each_with(modules), overlapped=0)
            for micro_batches in (1, 2):
                check(plan_steps(spec, 3, micro_batches=micro_batches).operations, spec)


def test_every_mark_is_waited_for():
    from fsdp.test_plan import SIZES, without

    spec = Spec(tuple(UnitSpec(name, SIZES) for name in "abc"), True, each_with(3))
    operations = plan_steps(spec, 2).operations
    check(operations, spec)
    for what in ("gathered", "copied", "packed", "reduced", "finished"):
        with pytest.raises(PlanError):
            check(without(operations, what), spec)
