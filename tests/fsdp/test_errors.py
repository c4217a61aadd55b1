"""The classic mistakes are named, with what to do, and none of them hangs."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from fsdp.compare import OUTPUTS, WIDTH, Block, Model, adamw, apart, batches, loss_of, mine, shard_blocks
from ranks import fresh_values, run_fresh, run_ranks
from terrazzo._torch.groups import without_groups
from terrazzo._torch.storages import CAN_SWAP, HAS_ACCESS_ERRORS
from terrazzo.errors import DivergedRanksError, DTensorArgumentError, FSDPError, FSDPValueError
from terrazzo.fsdp import fully_shard
from terrazzo.fsdp.group import group_of
from terrazzo.tensor import Shard, init_device_mesh


def check_arguments() -> None:
    with pytest.raises(FSDPValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(FSDPValueError, match="expected an nn.Module or a list of them, not int"):
        fully_shard([3])
    with pytest.raises(FSDPValueError, match="does not support containers that do not implement forward.*ModuleList"):
        fully_shard(nn.ModuleList([nn.Linear(1, 1)]))
    with pytest.raises(FSDPValueError, match="reshard_after_forward must be True, False, None or a number"):
        fully_shard(nn.Linear(1, 1), reshard_after_forward="yes")
    with pytest.raises(FSDPError, match="called twice on the same FSDPLinear"):
        fully_shard(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(FSDPError, match="needs streams, which PyTorch does not have for the device 'mps'"):
        fully_shard(nn.Linear(2, 2), mesh=without_groups("mps", torch.arange(dist.get_world_size())))
    with pytest.raises(FSDPError, match="expects a 1D or 2D DeviceMesh"):
        fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1, 1, 2)))
    with pytest.raises(FSDPError, match="reshard_after_forward=3 must divide the number of ranks that shard, 2"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    with pytest.raises(FSDPValueError, match="shard_placement_fn returned 1 for 'weight'"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: 1)
    with pytest.raises(FSDPValueError, match=r"returned Shard\(dim=1\) for 'bias' of shape \(2,\)"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(1))
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(TwoTensor(torch.tensor(1.0), torch.tensor(1.0)))
    with pytest.raises(FSDPError, match=r"'scale' is a scalar and a TwoTensor.*to a 1D tensor with numel equal to 1"):
        fully_shard(scalar)
    foreign = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    foreign.weight = nn.Parameter(torch_tensor.distribute_tensor(torch.ones(2, 2), mesh, [torch_tensor.Replicate()]))
    with pytest.raises(FSDPError, match="'weight' is a DTensor of torch.distributed: use terrazzo"):
        fully_shard(foreign)


def test_arguments_that_make_no_sense():
    run_ranks(2, check_arguments)


def check_mistakes() -> None:
    model = Model()
    early = torch.optim.AdamW(model.parameters())
    shard_blocks(model)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    for _ in range(2):
        with pytest.raises(
            FSDPError, match=r"AdamW was built before fully_shard: it holds 22 parameters \('weight'|'norm"
        ):
            early.step()
    adamw(model).step()

    tied = Model()
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    fully_shard(tied.blocks[0])
    with pytest.raises(
        FSDPError, match=r"'up.weight' is shared with 'up.weight'.*fully_shard\(\[module_a, module_b\]\)"
    ):
        fully_shard(tied.blocks[1])

    shared = Block()
    outer = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    fully_shard(outer[0])
    with pytest.raises(FSDPError, match=r"'0.norm.weight' was taken as '0.norm.weight'.*module that they share first"):
        fully_shard(outer[1])

    hooked = Block()
    hooked.up.weight.register_hook(lambda grad: grad * 2)
    hooked.down.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.warns(UserWarning, match=r"on parameters \('up.weight', 'down.bias'\) before fully_shard"):
        fully_shard(hooked)

    parts = [Block(), Block()]
    fully_shard(parts)
    with pytest.raises(FSDPError, match="were sharded as one group, but no module that contains them was"):
        parts[0](torch.randn(1, 7))

    with pytest.raises(RuntimeError, match=r"embed\.weight.*fully_shard.*call the module"):
        model.forward(x)

    model.reshard()
    with pytest.raises(
        DTensorArgumentError, match=r"cannot replicate 'embed.weight' of this FSDPModel, because it is a DTensor"
    ):
        DistributedDataParallel(model)
    plain = nn.Linear(2, 2)
    DistributedDataParallel(plain)(torch.ones(1, 2)).sum().backward()
    assert torch.equal(plain.weight.grad, torch.ones(2, 2))


def test_classic_mistakes():
    run_ranks(2, check_mistakes)


class Hiding(nn.Module):
    """The loss depends on what it returns in an object alone. Backward reads its parameters elementwise: that gives NaN
    where a matrix product raises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = (x * self.scale).tanh() * self.scale
        return x.detach(), SimpleNamespace(x=x)


class WithHiding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hiding(), Hiding()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)[1].x
        return self.head(x)


def check_hidden_outputs() -> None:
    x, y = next(batches(1))
    model = apart(shard_blocks(WithHiding(), reshard_after_forward=True))
    for step in range(3):
        if step == 2:  # as it says
            model.set_reshard_after_forward(False)
            loss_of(model, mine(x), mine(y)).backward()
            assert all(p.grad.to_local().isfinite().all() for p in model.parameters())
            break
        loss = loss_of(model, mine(x), mine(y))
        # Where PyTorch was built for CUDA, backward stops at the first access to what was freed.
        accessed = "'blocks.1.scale', .* was used after" if HAS_ACCESS_ERRORS else "$."
        noticed = r"gradients of \['blocks.1', 'blocks.0'\] without notice"
        with pytest.raises(RuntimeError, match=f"{accessed}|{noticed}"):
            loss.backward()
        model.zero_grad()


@pytest.mark.skipif(not HAS_ACCESS_ERRORS and not CAN_SWAP, reason="this PyTorch reads freed memory: docs say so")
def test_outputs_that_nobody_sees():
    run_ranks(2, check_hidden_outputs)


def check_only_the_root() -> None:
    for shard, warned in ((fully_shard, True), (shard_blocks, False)):
        model = Model(3, 600, 1800)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            shard(model)
            model(torch.randn(1, 6))
            model(torch.randn(1, 6))
        told = [w for w in seen if "only on the root" in str(w.message)]
        assert len(told) == warned


def test_sharding_only_the_root_is_remarked_on_once():
    run_ranks(2, check_only_the_root)


# ------------------------------------------------------------------ ranks that take another path


class Forking(Model):
    """Rank 1 leaves out a block."""

    skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i != self.skipped or dist.get_rank() != 1:
                x = block(x)
        return self.head(x)


def limit_waiting(*groups: Any) -> None:
    """From now on, and for all ranks at once, collectives fail soon."""
    dist.barrier()
    for group in groups or (None,):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)


def check_skipped() -> str:
    model = shard_blocks(Forking(3, 600, 1800))
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    model.skipped = 1
    with pytest.raises(DivergedRanksError) as caught:  # at once: nobody waits for the group's time limit
        loss_of(model, mine(x), mine(y)).backward()
    return str(caught.value)


def test_a_rank_that_skips_a_module_is_named():
    for value in fresh_values(2, check_skipped):
        assert "ranks ran different modules" in value and "rank 0 run blocks.1, rank 1 " in value


class Swapping(Model):
    """Rank 1 runs two blocks in the other order; their sizes are the same."""

    swaps = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        order = [1, 0, 2] if self.swaps and dist.get_rank() == 1 else [0, 1, 2]
        for i in order:
            x = self.blocks[i](x)
        return self.head(x)


def check_swapped() -> str:
    model = shard_blocks(Swapping(3, 600, 1800))
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    model.swaps = True
    with pytest.raises(DivergedRanksError) as caught:
        loss_of(model, mine(x), mine(y)).backward()
    return str(caught.value)


def test_ranks_that_run_modules_in_another_order_are_told():
    for value in fresh_values(2, check_swapped):
        assert "ranks ran different modules" in value and "rank 0 run blocks.0, rank 1 " in value


def begin_together() -> None:
    """Without the limit of the default group."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(dist.get_world_size())], timedelta(minutes=5))


def check_small(in_first_step: bool) -> str:
    if in_first_step:  # messages between two ranks keep the limit that their group was made with
        dist.destroy_process_group()
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = Forking()
    model.blocks[1] = Block(7, 33)  # what rank 1 leaves out is larger than what it asks for instead
    apart(shard_blocks(model))
    x, y = next(batches(1))
    if in_first_step:
        begin_together()
    else:
        loss_of(model, mine(x), mine(y)).backward()
    model.skipped = 1
    with pytest.raises(DivergedRanksError) as caught:
        loss_of(model, mine(x), mine(y)).backward()
    return str(caught.value)


@pytest.mark.parametrize("in_first_step", [False, True])
def test_small_groups_are_not_mixed_up_and_end_no_process(in_first_step):
    """gloo would end the process in which a collective meets one of another size."""
    for value in fresh_values(2, check_small, in_first_step):
        if in_first_step:
            assert "then unshard blocks.1" in value and "then unshard blocks.2" in value
        else:
            assert "rank 0 run blocks.1, rank 1 run blocks.2" in value


def name_who_is_absent(model: Any, absent: int) -> str:
    """All but one go on, and find that it does not come; it waits until they have."""
    store, others = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1
    x, y = next(batches(1))
    if dist.get_rank() == absent:
        store.wait([f"named by {i + 1}" for i in range(others)], timedelta(minutes=5))
        return ""
    with pytest.raises(DivergedRanksError) as caught:
        loss_of(model, mine(x), mine(y)).backward()
    store.set(f"named by {store.add('named', 1)}", "")
    return str(caught.value)


def check_absent() -> str:
    model = shard_blocks(Model())
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    limit_waiting()
    return name_who_is_absent(model, 1)


def test_a_rank_that_does_not_come_is_named():
    first, second = run_fresh(2, check_absent)
    assert first.ok and second.ok, (first, second)
    assert "rank 1: not in a collective of this model" in first.value
    assert "rank 0: at event" in first.value and "unshard Model" in first.value


def check_forward_alone() -> str:
    """Nothing has to be gathered for it."""
    model = shard_blocks(Model(), reshard_after_forward=False)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    loss = loss_of(model, mine(x), mine(y))
    limit_waiting(None, group_of(model).root.watch._beside.group)
    with pytest.raises(DivergedRanksError) as caught:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(x)
        loss.backward()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:  # which has the store, of which the other asks as well
        store.wait(["rank 1 was told"], timedelta(minutes=5))
    else:
        store.set("rank 1 was told", "")
    return str(caught.value)


def test_a_rank_that_alone_begins_a_forward_is_named():
    for value in fresh_values(2, check_forward_alone):
        first, second = (line for line in value.splitlines() if ": at event" in line)
        assert "rank 0" in first and first.endswith("then begin a forward, or unshard()")
        assert "rank 1" in second and "then reduce" in second and "begin" not in second


def check_absent_from_a_grid() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(Model(), mesh=mesh)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    limit_waiting(*mesh.get_all_groups())
    return name_who_is_absent(model, 3)


@pytest.mark.long
def test_other_replicas_name_it_too():
    for value in fresh_values(4, check_absent_from_a_grid)[:3]:
        assert "rank 3: not in a collective of this model" in value
        assert "ranks 0-1: at event" in value and "rank 2: at event" in value  # 2 waits for 3 before the others do


def check_unsharded_parameters() -> None:
    """Which `model.parameters()` gives where a module is unsharded."""
    model = shard_blocks(Model())
    x, y = next(batches(1))
    with torch.no_grad():
        model(x)
    optimizer = adamw(model)
    loss_of(model, mine(x), mine(y)).backward()
    for _ in range(2):
        with pytest.raises(FSDPError, match=r"AdamW was built while 4 .*'embed.weight'.* were unsharded.*reshard\(\)"):
            optimizer.step()
    adamw(model).step()


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_of_unsharded_parameters(world):
    run_ranks(world, check_unsharded_parameters)


def check_added() -> None:
    model = shard_blocks(Model(), ignored_params={(ignored := nn.Parameter(torch.ones(2)))})
    model.ignored = ignored
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        adamw(model).step()
    assert not remarks
    model.head = nn.Linear(WIDTH, OUTPUTS)
    loss_of(model, mine(x), mine(y)).backward()
    optimizer = adamw(model)
    with pytest.warns(UserWarning, match="'head.weight', 'head.bias'.* each rank trains its own"):
        optimizer.step()


def test_parameters_that_come_after_sharding():
    run_ranks(2, check_added)
