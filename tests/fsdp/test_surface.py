"""What else PyTorch's surface has: communication of users' own, groups of their own, odd modules, types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import Model, adamw, apart, assert_same_parameters, batches, loss_of, mine, shard_blocks, train_alike
from fsdp.plan_checker import check, plan_steps
from ranks import device_type, run_ranks
from terrazzo.comm import wire
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, report, share_comm_ctx, trace
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.module import _stage
from terrazzo.fsdp.plan.operations import Kind
from terrazzo.fsdp.run import comm
from terrazzo.fsdp.run.root import root_of
from terrazzo.fsdp.run.staging import GroupMemory
from terrazzo.tensor import DTensor, distribute_tensor

pytestmark = pytest.mark.on_late


class Own:
    """Communication that counts, and keeps its memory."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(Own):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.calls.append(input_tensor.numel())
        at = dist.get_rank(group) * input_tensor.nbytes
        assert input_tensor.data_ptr() == output_tensor.data_ptr() + at, "it lies in the memory that was asked for"
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduce(Own):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.calls.append(op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def check_own_communication() -> None:
    for late in (False, True):
        gather, reduce = OwnGather(), OwnReduce()

        def shard(model: Any, late: bool = late, gather: Any = gather, reduce: Any = reduce) -> None:
            shard_blocks(model)
            if late:
                loss_of(model, *next(batches(1, ranks=1))).backward()
                model.zero_grad()
            for module in (model, model.blocks[0]):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
                module.set_force_sum_reduction_for_comms(True)
            model.set_separate_reduce_scatter_group()

        train_alike(shard, steps=3)
        assert len(reduce.calls) == 3 * 2 and set(reduce.calls) == {dist.ReduceOp.SUM}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, gather.calls)
        assert len(gather.calls) >= 3 * 2 and all(each == everyone[0] for each in everyone), "equally long inputs"


@pytest.mark.parametrize("world", [2, 4])
def test_communication_of_the_users_own(world):
    run_ranks(world, check_own_communication)


def check_separate_group() -> None:
    def shard(model: Any) -> None:
        shard_blocks(model)
        model.set_separate_reduce_scatter_group()

    model = train_alike(shard, steps=3)
    model.set_separate_reduce_scatter_group(False, recurse=False)
    loss_of(model, *next(batches(1, ranks=1))).backward()
    other = shard_blocks(Model())
    share_comm_ctx([model, other])
    loss_of(other, *next(batches(1, ranks=1))).backward()
    with pytest.raises(FSDPValueError, match="share_comm_ctx expected modules that fully_shard was called on"):
        share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]


def test_a_separate_group_for_reductions():
    run_ranks(2, check_separate_group)


# ------------------------------------------------------------------ names, arguments, settings


class Counting(GroupMemory):
    """Memory of a backend that has some: gloo has none."""

    given: ClassVar[list[int]] = []

    def serves(self, axis: Any, device: torch.device) -> bool:
        return axis.group is not None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Any) -> Tensor:
        self.given.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)


def check_staging() -> None:
    train_alike(lambda m: shard_blocks(m).set_allocate_memory_from_process_group_for_comm(True), steps=2)

    def shard(model: Any) -> None:
        shard_blocks(model)
        for module in (model, *model.blocks):
            _stage(group_of(module), Counting())

    Counting.given = []
    train_alike(shard, steps=3)
    groups, steps = 4, 3
    gathers = 2 * groups - 1  # the root's parameters stay for backward
    again = steps - 1  # what ran last is gathered again in the first step only
    assert len(Counting.given) == steps * (gathers + 2 * groups) - again, "what is gathered, packed and reduced"
    assert all(numel > 0 for numel in Counting.given)

    model = shard_blocks(Model())
    with pytest.raises(FSDPError, match="needs CUDA devices, but this module is sharded over cpu"):
        model.set_symm_mem_for_comm()
    with pytest.raises(FSDPValueError, match="must be 'NCCL', not 'NVSHMEM'"):
        model.set_symm_mem_for_comm("NVSHMEM")
    model.set_custom_all_gather(OwnGather())
    with pytest.raises(FSDPValueError, match="set_custom_all_gather was called on this module"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.cpu_only("what only the CPU does")
def test_what_is_communicated_lies_where_the_backend_wants_it():
    run_ranks(2, check_staging)


@contextmanager
def communicated() -> Iterator[dict[str, list[Tensor]]]:
    """The buffers of collectives, which exist as long as the lists: no memory of two is the same by chance."""
    found: dict[str, list[Tensor]] = {"all_gather": [], "reduce_scatter": []}
    before = wire.all_gather, comm.start_reduce

    def all_gather(axis: Any, out: Tensor, part: Tensor) -> Any:
        found["all_gather"].append(out)
        return before[0](axis, out, part)

    def start_reduce(sections: Tensor, *args: Any) -> Any:
        found["reduce_scatter"].append(sections)
        return before[1](sections, *args)

    wire.all_gather, comm.start_reduce = all_gather, start_reduce
    try:
        yield found
    finally:
        wire.all_gather, comm.start_reduce = before


def memories(buffers: list[Tensor]) -> dict[int, set[int]]:
    """By size the addresses of buffers."""
    return {n: {x.data_ptr() for x in buffers if x.nbytes == n} for n in {x.nbytes for x in buffers}}


def check_double_buffers() -> None:
    """Of each size two buffers are used by turns, whatever runs in between, and the numbers are those of one device."""
    for shard in (shard_blocks, lambda model: apart(shard_blocks(model, reshard_after_forward=True))):
        train_alike(lambda m, shard=shard: shard(m).set_double_buffers(), steps=3)

    for double in (True, False):
        model = apart(shard_blocks(Model(5), reshard_after_forward=True))
        model.set_double_buffers(double)
        buckets = [group_of(block).unit.buckets for block in model.blocks]
        model.set_double_buffers(double)
        assert buckets == [group_of(block).unit.buckets for block in model.blocks], "what changes nothing costs nothing"
        with communicated() as found, trace(model) as steps:
            for x, y in batches(3):
                with torch.inference_mode():
                    model(x)
                loss_of(model, mine(x), mine(y)).backward()
        own = {kind: memories(buffers) for kind, buffers in found.items()}
        if not double:
            assert max(len(places) for places in own["reduce_scatter"].values()) == 15
            continue
        assert {len(places) for kind in own.values() for places in kind.values()} <= {1, 2}
        kept = sum(size * len(places) for kind in own.values() for size, places in kind.items())
        assert steps.operations[-1].after == kept > 0, "what is not freed"
        said = report(model)
        assert said.peak - said.held == max(each.memory for each in steps.operations)
        model.set_double_buffers(False)
        with trace(model) as steps:
            loss_of(model, mine(x), mine(y)).backward()
        assert steps.operations[-1].after == 0

    model = shard_blocks(Model())  # in a backend's memory
    for module in (model, *model.blocks):
        _stage(group_of(module), Counting())
    model.set_double_buffers()
    (x, y), *others = batches(3)
    loss_of(model, mine(x), mine(y)).backward()
    Counting.given = []
    for x, y in others:
        loss_of(model, mine(x), mine(y)).backward()
    assert len(Counting.given) == len(others) * 4, "only the results of reductions, which become gradients"

    model = apart(shard_blocks(Model(5), reshard_after_forward=True))
    model.set_double_buffers()
    model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks)[1:])
    with communicated() as found:
        for x, y in batches(3):
            loss_of(model, mine(x), mine(y)).backward()
    blocks = max(memories(found["all_gather"]).values(), key=len)
    assert len(blocks) > 2, "more than two are needed at once, and the others are freed"


@pytest.mark.cpu_only("addresses of what exists")
def test_double_buffers():
    run_ranks(2, check_double_buffers)


def check_buffers() -> None:
    def shard(buffers: int) -> Any:
        model = apart(shard_blocks(Model(4)))
        model.set_reduce_scatter_max_input_buffers(buffers)
        model.set_reduce_scatter_unused_params(True)
        return model

    for buffers in (1, 2, 9):
        model = shard(buffers)
        spec = dataclasses.replace(root_of(group_of(model)).spec(), overlapped=0)
        operations = plan_steps(spec, 2).operations
        check(operations, spec, bound=report(model).peak - report(model).held)
        under_way, most = 0, 0
        for each in operations:
            under_way += (each.kind is Kind.REDUCE) - (each.kind is Kind.HAND_OVER)
            most = max(most, under_way)
        assert most == min(buffers, 5)
    train_alike(lambda model: (shard_blocks(model), model.set_reduce_scatter_max_input_buffers(3)), steps=3)
    for wrong, error in ((True, TypeError), (2.0, TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_input_buffers must be"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="reshard_after_forward must be True or False here, not 2"):
        model.set_reshard_after_forward(2)


@pytest.mark.cpu_only("what only the CPU does")
def test_reductions_under_way_are_as_many_as_the_user_allows():
    run_ranks(2, check_buffers)


def check_reset() -> None:
    torch.manual_seed(0)
    model = shard_blocks(Model())
    reference = Model()
    reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    x, y = next(batches(1))
    model.set_requires_gradient_sync(False)
    loss_of(model, mine(x), mine(y)).backward()  # to be dropped, as what comes next fails
    model.set_requires_gradient_sync(True)
    with pytest.raises(ZeroDivisionError):
        model.head.register_forward_hook(lambda *_: 1 / 0)
        model(mine(x))
    model.head._forward_hooks.clear()
    with pytest.raises(
        RuntimeError, match=r"reset_iter_state must be called on the root module, 'Model', not on 'blocks.0'"
    ):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters()), "everything is sharded"
    loss_of(model, mine(x), mine(y)).backward()
    loss_of(reference, x, y).backward()
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), wanted.grad)


def test_an_iteration_that_failed_is_forgotten():
    run_ranks(2, check_reset)


class FailingWork:
    """A collective that the ranks hear of as failed, after it was done."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, *_: Any) -> bool:
        self.work.wait()
        raise RuntimeError("the link went down")


class FailingGather(OwnGather):
    fails = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        return FailingWork(work) if self.fails else work


def check_reset_of_what_fails_as_well() -> None:
    torch.manual_seed(0)
    model: Any = shard_blocks(Model())
    gather = FailingGather()
    for module in (model, *model.blocks):
        module.set_custom_all_gather(gather)
    x, y = next(batches(1))
    wanted = loss_of(model, mine(x), mine(y))
    wanted.backward()
    model.zero_grad()
    model.reshard()
    gather.fails = True
    for module in (model, *model.blocks):
        module.unshard(async_op=True)  # all of them are under way, and each of them fails
    with pytest.raises(RuntimeError, match="the link went down"):
        model(mine(x))
    assert all(isinstance(p, DTensor) for p in model.parameters()), "everything is sharded"
    gather.fails = False
    assert torch.equal(loss_of(model, mine(x), mine(y)), wanted)
    for module in (model, *model.blocks):
        module.reshard()
    gather.fails = True
    for module in (model, *model.blocks):
        module.unshard(async_op=True)
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters()), "everything is sharded"


@pytest.mark.cpu_only("on accelerators a gather is waited for when it begins")
def test_what_was_under_way_beside_it_may_fail_as_well():
    run_ranks(2, check_reset_of_what_fails_as_well)


# ------------------------------------------------------------------ odd modules


def check_list_from_meta() -> None:
    """In torchtitan's order: everything is sharded on the meta device, then materialised, then initialised."""
    torch.manual_seed(0)
    reference = Model()
    with torch.device("meta"):
        model: Any = Model()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.embed, model.head])
    fully_shard(model)
    model.to_empty(device=device_type())
    assert not any(p.is_meta for p in model.parameters())
    model.load_state_dict({name: like(value, model) for name, value in reference.state_dict().items()})
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        reference.to(dtype)
        x, _ = next(batches(1))
        torch.testing.assert_close(model(x.to(dtype)), reference(x.to(dtype)))
    model.reshard()  # the root's parameters are unsharded after a forward
    ours, theirs = adamw(model), adamw(reference)
    for x, y in batches(3):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)

    with torch.device("meta"):
        fresh: Any = Model()
    fully_shard([fresh.blocks[0], fresh.blocks[1]])
    fully_shard(fresh)
    fresh.to_empty(device=device_type())
    for module in fresh.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert fresh(torch.randn(2, 6)).isfinite().all()


def like(value: Tensor, model: Any) -> DTensor:
    parameter = next(iter(model.parameters()))
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def test_a_list_group_leaves_the_meta_device_and_changes_its_dtype():
    run_ranks(2, check_list_from_meta)


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.table(x)


def check_odd_modules() -> None:
    torch.manual_seed(0)
    plain = WithoutForward()
    model: Any = fully_shard(copy.deepcopy(plain))
    register_fsdp_forward_method(model, "encode")
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    torch._dynamo.reset()
    linear = nn.Linear(4, 4)
    compiled: Any = fully_shard(torch.compile(copy.deepcopy(linear), backend="aot_eager"))
    assert isinstance(compiled, FSDPModule)
    compiled(x).sum().backward()
    linear(x).sum().backward()
    for ours, theirs in zip(compiled.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    torch._dynamo.reset()


def test_modules_without_forward_and_compiled_ones():
    run_ranks(2, check_odd_modules)
