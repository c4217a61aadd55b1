"""What else PyTorch's surface has: communication of users' own, groups of their own, odd modules, types."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import Model, adamw, assert_same_parameters, batches, loss_of, mine, shard_blocks, train_alike
from ranks import run_ranks
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from terrazzo.tensor import DTensor, distribute_tensor


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
            model.set_force_sum_reduction_for_comms(True)
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
    with pytest.raises(FSDPValueError, match="share_comm_ctx takes modules that fully_shard was called on"):
        share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]


def test_a_separate_group_for_reductions():
    run_ranks(2, check_separate_group)


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
    model.to_empty(device="cpu")
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
    fresh.to_empty(device="cpu")
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
    run_ranks(2, check_odd_modules, timeout=120)
