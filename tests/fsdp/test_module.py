"""Every method of FSDPModule and UnshardHandle, and register_fsdp_forward_method."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
)
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, trace
from terrazzo.fsdp.plan.state import Where
from terrazzo.fsdp.run import executor
from terrazzo.fsdp.run.root import Root
from terrazzo.tensor import DTensor, Replicate, init_device_mesh

pytestmark = pytest.mark.on_late(both=True)

WORLDS = pytest.mark.parametrize("world", [2, 4])


def sharded_and_plain(**options: object) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    return shard_blocks(model, **options), reference


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


# ------------------------------------------------------------------ settings


def check_settings_that_stay() -> None:
    """Programs set some for every micro-batch: plans are made again only when one has another value than before."""
    model = shard_blocks(Model())
    made: list[Root] = []
    found = []

    def hook(gradients: Tensor) -> None:
        gradients.mul_(1.0)

    with pytest.MonkeyPatch.context() as patch:
        before = Root.spec
        patch.setattr(Root, "spec", lambda self: made.append(self) or before(self))
        for sync in (True, True, False, False, True):
            made.clear()
            for x, y in batches(2):
                model.set_requires_gradient_sync(sync)
                model.set_reshard_after_backward(True)
                model.set_reshard_after_forward(True)
                model.set_requires_all_reduce(True)
                model.set_reduce_scatter_max_input_buffers(2)
                model.set_coalesce_bytes(1000)
                model.set_all_reduce_hook(hook)
                model.set_reduce_scatter_divide_factor(2.0)
                model.set_force_sum_reduction_for_comms(True)
                model.set_separate_reduce_scatter_group()
                model.set_modules_to_forward_prefetch([model.blocks[0]])
                model.set_modules_to_backward_prefetch([model.blocks[1]])
                loss_of(model, mine(x), mine(y)).backward()
            found.append(len(made))
    assert found[1:] == [0, 1, 0, 0]  # with or without a reduction was planned before


def test_settings_that_stay_as_they_are():
    run_ranks(2, check_settings_that_stay)


# ------------------------------------------------------------------ unshard and reshard


def check_unshard() -> None:
    model, reference = sharded_and_plain()
    block = model.blocks[0]
    assert model.blocks[0].unshard() is None
    assert not isinstance(block.up.weight, DTensor)
    assert torch.equal(block.up.weight, reference.blocks[0].up.weight)
    assert isinstance(model.blocks[1].up.weight, DTensor), "not recursive"
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    block.reshard()  # again: nothing

    handle = block.unshard(async_op=True)
    assert repr(handle).startswith("UnshardHandle(group=<group ")
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert torch.equal(block.down.bias, reference.blocks[0].down.bias)
    block.reshard()

    x, _ = next(batches(1))
    handles = [module.unshard(async_op=True) for module in model.blocks]  # ended by forward
    torch.testing.assert_close(model(x), reference(x))
    assert len(handles) == 3
    model.reshard()
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.fill_(2.0)
    block.unshard()
    assert torch.equal(block.up.weight, torch.full((10, 7), 2.0))


@WORLDS
def test_unshard_and_reshard_by_hand(world):
    run_ranks(world, check_unshard)


def check_reshard_after_backward() -> None:
    model, reference = sharded_and_plain()
    ours, theirs = adamw(model), adamw(reference)
    apart(model).set_reshard_after_backward(False)
    for step, (x, y) in enumerate(batches(4)):
        with Counted() as kinds:
            loss_of(model, mine(x), mine(y)).backward()
        # The optimizer changed the shards, so whole parameters of the step before are not used.
        assert kinds.count("all_gather") == 4 + (2 if step else 3), step  # what ran last is not gathered again
        loss_of(reference, x, y).backward()
        assert isinstance(model.blocks[0].up.weight, DTensor)  # it has the gradient
        with Counted() as kinds:
            loss_of(model, mine(x), mine(y))
        assert kinds == [], "nothing changed, nothing is gathered"
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)

    # Stale whole parameters are noticed: the optimizer steps on the shards that it knows.
    model.set_reshard_after_forward(False)
    x, y = next(batches(1))
    for module, part in ((model, mine), (reference, lambda t: t)):
        loss_of(module, part(x), part(y)).backward()
    ours.step()
    theirs.step()
    torch.testing.assert_close(model(x), reference(x))


def test_parameters_kept_after_backward():
    run_ranks(2, check_reshard_after_backward)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def check_unshard_in_backward() -> None:
    torch.manual_seed(0)
    model = Embedding()
    reference = copy.deepcopy(model)
    fully_shard(model.table)
    fully_shard(model.head)
    fully_shard(model)
    ids = torch.arange(8) % 11
    apart(model).table.set_unshard_in_backward(False)
    found = []
    for _ in range(2):
        model.zero_grad()
        with Counted() as kinds:
            model(ids).sum().backward()
        found.append(kinds.count("all_gather"))
    assert found == [3, 2], "two for forward, and one for backward of the head, which then stays for that"
    reference(ids).sum().backward()
    assert_same_gradients(model, reference)


def test_no_gather_in_backward_where_none_is_needed():
    run_ranks(2, check_unshard_in_backward)


# ------------------------------------------------------------------ prefetching


def check_prefetch() -> None:
    model, reference = sharded_and_plain(reshard_after_forward=True)
    first, second, third = apart(model).blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([])
    x, y = next(batches(1))
    for _ in range(2):
        model.zero_grad()
        with trace(model) as steps:
            loss_of(model, mine(x), mine(y)).backward()
    shown = steps.timeline()
    ahead = [(shown.names_of(each), each.backward) for each in steps.operations if each.why == "prefetch"]
    assert ahead == [
        *[("blocks.0", False), ("blocks.1", False), ("blocks.2", False)],
        *[("blocks.2", True), ("blocks.1", True), ("blocks.0", True)],
    ]
    loss_of(reference, x, y).backward()
    assert_same_gradients(model, reference)
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(
            FSDPValueError, match=f"{method} expected modules that fully_shard was called on, not Linear"
        ):
            getattr(model, method)([model.head])


@WORLDS
def test_explicit_prefetching(world):
    run_ranks(world, check_prefetch)


# ------------------------------------------------------------------ gradients


def check_accumulation() -> None:
    for reduce_at_once, messages in product((True, False), (4, 2)):  # each alone; the root and the blocks
        model, reference = sharded_and_plain()
        model.set_coalesce_bytes(0 if messages == 4 else 4 << 20)
        ours, theirs = adamw(model), adamw(reference)
        for _ in range(3):
            for step, (x, y) in enumerate(batches(3)):
                last = step == 2
                if not reduce_at_once:
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
                with Counted() as kinds:
                    loss_of(model, mine(x), mine(y)).backward()
                assert kinds.count("reduce_scatter") == (messages if last or reduce_at_once else 0)
                loss_of(reference, x, y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, reference)


@WORLDS
@pytest.mark.on_late(sample=True)
def test_gradients_accumulate_with_and_without_communication(world):
    run_ranks(world, check_accumulation)


def check_not_recursive() -> None:
    model, _ = sharded_and_plain()
    apart(model).set_requires_gradient_sync(False, recurse=False)
    x, y = next(batches(1))
    with Counted() as kinds:
        loss_of(model, mine(x), mine(y)).backward()
    assert kinds.count("reduce_scatter") == 3
    assert model.head.weight.grad is None and model.blocks[0].up.weight.grad is not None
    model.set_requires_gradient_sync(True, recurse=False)
    model.set_reshard_after_backward(False, recurse=False)
    loss_of(model, mine(x), mine(y)).backward()
    kept = [where_of(module) is Where.RESTING for module in (model, model.blocks[0])]
    assert kept == [True, False]
    assert model.head.weight.grad is not None


def test_settings_for_one_module_only():
    run_ranks(2, check_not_recursive)


def check_hsdp_accumulation() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    model, reference = sharded_and_plain(mesh=mesh)
    ours, theirs = adamw(model), adamw(reference)
    for together in (False, True):
        model.set_coalesce_bytes(together << 20)
        for step, (x, y) in enumerate(batches(3)):
            last = step == 2
            model.set_requires_all_reduce(last)
            with Counted() as kinds:
                loss_of(model, mine(x), mine(y)).backward()
            messages = 2 if together else 4  # the root, which is not freed after forward, goes alone
            assert kinds.count("reduce_scatter") == messages and kinds.count("all_reduce") == last * messages
            assert (model.head.weight.grad is not None) == (step == 2)
            loss_of(reference, x, y).backward()
        assert_same_gradients(model, reference)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


def test_hsdp_gradients_accumulate_before_the_all_reduce():
    run_ranks(4, check_hsdp_accumulation)


def check_hook() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded_and_plain(mesh=mesh["shard"])
    sizes: list[int] = []

    def reduce_over_replicas(reduced: Tensor) -> None:
        sizes.append(reduced.numel())
        dist.all_reduce(reduced, group=mesh["replicate"].get_group())
        reduced.div_(2)

    for module in [*model.blocks, model]:
        module.set_all_reduce_hook(reduce_over_replicas)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    loss_of(reference, x, y).backward()
    assert_same_gradients(model, reference)
    assert len(sizes) == 4


def test_all_reduce_hook():
    run_ranks(4, check_hook)


def check_divide_factor() -> None:
    world = dist.get_world_size()
    for method in ("set_reduce_scatter_divide_factor", "set_gradient_divide_factor"):
        model, reference = sharded_and_plain()
        for module in [*model.blocks, model]:
            getattr(module, method)(0.5)
        x, y = next(batches(1))
        loss_of(model, mine(x), mine(y)).backward()
        (loss_of(reference, x, y) * world / 0.5).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(FSDPValueError, match="positive"):
        model.set_gradient_divide_factor(0)


@pytest.mark.parametrize("world", [1, 2])
def test_divide_factor(world):
    run_ranks(world, check_divide_factor)


def check_partly_missing() -> None:
    """A parameter that only some rank's data reaches is reduced, one that no data reaches has no gradient."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.some, self.none = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor, some: bool) -> Tensor:
            return self.all(x) + self.some(x) if some else self.all(x)

    torch.manual_seed(0)
    model = Gated()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x, dist.get_rank() == 0).sum().backward()
    reference(x, True).sum().backward()
    torch.testing.assert_close(model.some.weight.grad.full_tensor(), reference.some.weight.grad / dist.get_world_size())
    torch.testing.assert_close(model.all.weight.grad.full_tensor(), reference.all.weight.grad)
    assert model.none.weight.grad is None


def test_gradients_that_some_ranks_lack():
    run_ranks(2, check_partly_missing)


def check_post_optim_event() -> None:
    model, reference = sharded_and_plain()
    model.set_post_optim_event(None)
    x, _ = next(batches(1))
    torch.testing.assert_close(model(x), reference(x))


def test_post_optim_event_is_accepted_on_cpu():
    run_ranks(2, check_post_optim_event)


# ------------------------------------------------------------------ as a module


class Generating(Model):
    def generate(self, x: Tensor, *, times: int) -> Tensor:
        return self.embed(x) * times

    def broken(self) -> None:
        raise KeyError("broken")


def check_forward_methods() -> None:
    torch.manual_seed(0)
    model = Generating()
    reference = copy.deepcopy(model)
    shard_blocks(model, reshard_after_forward=True)
    x, _ = next(batches(1))
    for method in ("generate", "broken"):
        register_fsdp_forward_method(model, method)
    torch.testing.assert_close(model.generate(x, times=2), reference.generate(x, times=2))
    assert isinstance(model.embed.weight, DTensor)
    model.generate(mine(x), times=3).sum().backward()
    reference.generate(x, times=3).sum().backward()
    torch.testing.assert_close(
        model.embed.weight.grad.full_tensor() * dist.get_world_size(), reference.embed.weight.grad, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(KeyError):
        model.broken()
    assert isinstance(model.embed.weight, DTensor)
    register_fsdp_forward_method(reference, "generate")  # not sharded: nothing
    with pytest.raises(FSDPValueError, match="no method 'absent'"):
        register_fsdp_forward_method(model, "absent")


@WORLDS
def test_forward_methods(world):
    run_ranks(world, check_forward_methods)


def check_copies_and_moves() -> None:
    model, reference = sharded_and_plain()
    with pytest.raises(FSDPError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    with pytest.raises(FSDPError, match="cannot be pickled"):
        pickle.dumps(model)

    known = list(model.parameters())
    model.double()
    reference.double()
    x, y = next(batches(1))
    torch.testing.assert_close(model(x.double()), reference(x.double()))
    assert all(p.dtype is torch.float64 for p in model.parameters())
    model.float()
    reference.float()
    loss_of(model, mine(x), mine(y)).backward()
    loss_of(reference, x, y).backward()
    for p in model.parameters():  # the model notices writes to them, which does not go into pickles, nor do gradients
        torch.testing.assert_close(pickle.loads(pickle.dumps(p)).full_tensor(), p.full_tensor())
    assert_same_gradients(model, reference)
    assert [type(p) for p in known] == [DTensor] * len(known)
    model.blocks[0].up.to(torch.float64)  # a part of a group, behind its back
    with pytest.raises(FSDPError, match=r"blocks\.0\.norm\.weight.*float32.*blocks\.0\.up\.weight.*float64"):
        model(x)
    model.blocks[0].up.to(torch.float32)
    torch.testing.assert_close(model(x), reference(x))

    with pytest.raises(FSDPError, match=r"embed\.weight.*replaced by a Parameter of shape"):
        model.embed.weight = nn.Parameter(torch.ones(7, 6))
        model(x)


def test_copies_raise_and_moves_keep_the_shards_together():
    run_ranks(2, check_copies_and_moves)


def check_assigned_data() -> None:
    model, reference = sharded_and_plain()
    x, _ = next(batches(1))
    model(x)
    model.reshard()
    new = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    model.embed.weight.data = DTensor.from_local(new, model.embed.weight.device_mesh, [Replicate()]).redistribute(
        placements=model.embed.weight.placements
    )
    reference.embed.weight.data = new
    torch.testing.assert_close(model(x), reference(x))


def test_data_that_users_assign_is_used():
    run_ranks(2, check_assigned_data)


def check_slices() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:1]) is nn.Sequential and model[:1][0] is model[0]


def test_a_slice_of_a_sharded_sequence_is_an_ordinary_one():
    run_ranks(1, check_slices)


def check_failing_forward() -> None:
    model, reference = sharded_and_plain()

    class Stop(Exception):
        pass

    def fail(*_: object) -> None:
        raise Stop

    handle = model.blocks[1].down.register_forward_pre_hook(fail)
    x, y = next(batches(1))
    with pytest.raises(Stop):
        model(x)
    handle.remove()
    assert isinstance(model.blocks[1].up.weight, DTensor)
    out = model(x)
    out.register_hook(fail)
    with pytest.raises(Stop):
        out.sum().backward()
    inner = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(Stop):
        loss_of(model, mine(x), mine(y)).backward()
    inner.remove()
    model.zero_grad()
    loss_of(model, mine(x), mine(y)).backward()
    loss_of(reference, x, y).backward()
    assert_same_gradients(model, reference)


def test_after_an_exception_the_next_step_is_right():
    run_ranks(2, check_failing_forward)


def to_double(model: nn.Module) -> None:
    model.double()


def set_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def check_changed_while_accumulating() -> None:
    """Parameters that are made again, in another dtype or for new memory, keep the gradients that wait."""
    for change in (to_double, set_data):
        model, reference = sharded_and_plain()
        (x, y), (v, w) = batches(2)
        model.set_requires_gradient_sync(False)
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for each in (model, *model.blocks):
            each.reshard()
        change(model)
        change(reference)
        dtype = reference.head.weight.dtype
        model.set_requires_gradient_sync(True)
        loss_of(model, mine(v.to(dtype)), mine(w.to(dtype))).backward()
        loss_of(reference, v.to(dtype), w.to(dtype)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            # A part of each sum was computed in single precision.
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=2e-6, atol=1e-6, msg=change.__name__)


@WORLDS
@pytest.mark.on_late(sample=True)
def test_accumulated_gradients_survive_a_change_of_parameters(world):
    run_ranks(world, check_changed_while_accumulating)


def check_setters() -> None:
    """What a program sets for every micro-batch, changed or not, is planned once."""
    model = shard_blocks(Model())
    planned: list[str] = []
    advance, spec = executor.advance, Root.spec

    def step() -> None:
        for i, (x, y) in enumerate(batches(3)):
            model.set_requires_gradient_sync(i == 2)
            model.set_is_last_backward(i == 2)
            model.set_reshard_after_backward(i != 1)
            for each in (model, *model.blocks):
                each.set_reshard_after_forward(True, recurse=False)
                each.set_gradient_divide_factor(2.0)
                each.set_reduce_scatter_max_input_buffers(2)
            loss_of(model, mine(x), mine(y)).backward()

    def planned_again(*args: Any) -> Any:
        planned.append("operations")
        return advance(*args)

    def made_again(root: Root) -> Any:
        planned.append("input")
        return spec(root)

    for _ in range(3):
        step()
    executor.advance, Root.spec = planned_again, made_again  # type: ignore[method-assign]
    try:
        step()
        assert not planned
        model.set_gradient_divide_factor(3.0)  # this changes something
        step()
        assert set(planned) == {"input"}, "other numbers, the same operations"
    finally:
        executor.advance, Root.spec = advance, spec  # type: ignore[method-assign]


def test_setters_that_change_nothing_cost_no_plan():
    run_ranks(2, check_setters)
