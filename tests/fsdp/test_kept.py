"""`reshard_after_forward=<int>`: on whatever meshes training is that of one process, and memory goes as it is told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import terrazzo.fsdp as our_fsdp
from fsdp.compare import Model, apart, batches, loss_of, mine, shard_blocks, train_alike
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.fsdp import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, fully_shard, report
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.run.unit import Unit
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late(both=True)


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh(device_type(), sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def unit_of(module: nn.Module) -> Unit:
    group = group_of(module)
    assert group is not None
    return group.unit


def bytes_unsharded(module: nn.Module) -> int:
    """What the unsharded parameters really take now."""
    wholes = [bucket._whole for bucket in unit_of(module).buckets if not bucket.aliased]
    return sum(whole.places[0].untyped_storage().nbytes() for whole in wholes if whole is not None)


def bytes_kept(module: nn.Module) -> int:
    kept = [each._part.buffer for each in unit_of(module)._kept if each is not None and each._part is not None]
    return sum(buffer.untyped_storage().nbytes() for buffer in kept)


# ------------------------------------------------------------------ groups on different meshes


def shard_apart(model: Any) -> None:
    """Each group on a mesh of its own, of the same four ranks."""
    line, single, square = mesh_of(4), mesh_of(1, 4), mesh_of(2, 2)
    fully_shard(model.blocks[0], mesh=line, reshard_after_forward=2)
    fully_shard(model.blocks[1], mesh=single, reshard_after_forward=2)
    fully_shard(model.blocks[2], mesh=square, reshard_after_forward=2)  # all that shard: True
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps .* as False does"):
        fully_shard(model.blocks[3], mesh=square, reshard_after_forward=1)
    fully_shard(model, mesh=line, reshard_after_forward=2)


def check_groups() -> None:
    for bound in (0, 4 << 20):

        def shard(model: Any, bound: int = bound) -> None:
            shard_apart(model)
            model.set_coalesce_bytes(bound)

        model = train_alike(shard, make=lambda: Model(4))
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        x, y = next(batches(1))
        loss = loss_of(model, mine(x), mine(y))
        groups = {each.name: each for each in report(model).groups}
        for i, kept in enumerate((True, True, False, False)):
            block = model.blocks[i]
            found = groups[f"blocks.{i}"]
            assert bytes_kept(block) == (found.kept if kept else 0) and (bytes_kept(block) > 0) is kept
            assert bytes_unsharded(block) == (found.unsharded if i == 3 else 0)
        assert bytes_kept(model) == groups["Model"].kept > 0
        for i in (0, 1):  # what modules hold meanwhile are DTensors of the whole parameters, on the smaller mesh
            weight = model.blocks[i].up.weight
            assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert weight.placements == (Replicate(), Shard(0))
            assert torch.equal(weight.full_tensor(), whole[f"blocks.{i}.up.weight"])
        assert model.blocks[2].up.weight.placements == (Replicate(), Shard(0))
        assert model.blocks[3].up.weight.shape == (10, 7) and not isinstance(model.blocks[3].up.weight, DTensor)
        loss.backward()
        assert all(bytes_kept(each) == bytes_unsharded(each) == 0 for each in (model, *model.blocks))
        model.set_reshard_after_forward(True)
        loss_of(model, mine(x), mine(y))
        assert all(bytes_kept(each) == bytes_unsharded(each) == 0 for each in (model, *model.blocks)), "as PyTorch"


def test_groups_on_different_meshes():
    run_ranks(4, check_groups)


# ------------------------------------------------------------------ one group on several meshes


def one_group(f: Any, info: Callable[[Any], Any], reshard: Any) -> Callable[[Any], None]:
    """In every block the weights on one mesh, and the rest on another."""

    def shard(model: Any) -> None:
        line, other = mesh_of(4), info(f)
        for block in (*model.blocks, model):
            own = {p for p in block.parameters() if p.ndim == 2}
            f.fully_shard(
                block,
                mesh=line,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda p, own=own: own_result(f, other) if p in own else None,
            )

    return shard


def own_result(f: Any, info: Any) -> Any:
    if f is our_fsdp:
        return ShardPlacementResult(None, info)
    return torch_fsdp._fully_shard._fsdp_common.ShardPlacementResult(None, info)


def square_info(f: Any) -> Any:
    if f is our_fsdp:
        return HSDPMeshInfo(mesh_of(2, 2))
    return torch_fsdp._fully_shard._fsdp_common.HSDPMeshInfo(mesh_of(2, 2), 1, 0)


def single_info(f: Any) -> Any:
    if f is our_fsdp:
        return HSDPMeshInfo(mesh_of(1, 4))
    return torch_fsdp._fully_shard._fsdp_common.HSDPMeshInfo(mesh_of(1, 4), 1, 0)


def check_one_group() -> None:
    for info, keeps_all in ((square_info, False), (single_info, True)):
        model = train_alike(one_group(our_fsdp, info, 2))
        x, y = next(batches(1))
        before = {name: p.full_tensor() for name, p in model.named_parameters()}
        loss = loss_of(apart(model), mine(x), mine(y))
        block = model.blocks[0]
        assert bytes_unsharded(block) == 0
        assert bytes_kept(block) == {g.name: g.kept for g in report(model).groups}["blocks.0"] > 0
        assert [kept is not None for kept in unit_of(block)._kept] == [True, keeps_all]
        # Where nothing is kept parameters are as between steps; elsewhere they are on the smaller mesh.
        assert block.up.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), before[name])
        loss.backward()
        assert bytes_kept(block) == 0


def test_one_group_on_several_meshes():
    run_ranks(4, check_one_group)


class Wide(nn.Module):
    """Of sizes that PyTorch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def check_against_torch() -> None:
    """The same program, by PyTorch's fully_shard: what modules hold between forward and backward, and gradients."""
    rank = dist.get_rank()
    for info in (square_info, single_info):
        for reshard in (1, 2, 4) if info is single_info else (1, 2):
            results = []
            for f in (torch_fsdp, our_fsdp):
                torch.manual_seed(0)
                model = Wide()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    one_group(f, info, reshard)(model)
                x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))[rank]
                found = []
                for _ in range(2):
                    loss = model(x).square().mean()
                    seen = model.blocks[0][0].weight, model.blocks[0][0].bias
                    found += [(tuple(p.shape), p.device_mesh.mesh.tolist(), str(p.placements)) for p in seen if d(p)]
                    found += [p.to_local().clone() if d(p) else p.detach().clone() for p in seen]
                    loss.backward()
                found += [p.grad.full_tensor() for p in model.parameters()]
                results.append(found)
            for theirs, ours in zip(*results, strict=True):
                if isinstance(theirs, tuple):
                    assert theirs == ours, (info.__name__, reshard)
                else:
                    torch.testing.assert_close(ours, theirs, msg=f"{info.__name__} {reshard}")


def d(parameter: Any) -> bool:
    return hasattr(parameter, "placements")


@pytest.mark.skipif(
    not hasattr(torch_fsdp._fully_shard._fsdp_common, "ShardPlacementResult"),
    reason="this version of PyTorch has one mesh for a group",
)
def test_pytorch_holds_the_same_between_forward_and_backward():
    run_ranks(4, check_against_torch)


# ------------------------------------------------------------------ parameters that are DTensors before


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def check_parallel() -> None:
    """PyTorch refuses these. What modules hold meanwhile says of which tensor it is a part."""
    named = init_device_mesh(device_type(), (4, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = Two()
    for whole in (False, True):
        model: Any = copy.deepcopy(reference)
        if whole:
            distribute_module(model, named)
            dims = DataParallelMeshDims(shard="dp")
            fully_shard(model, mesh=named, dp_mesh_dims=dims, reshard_after_forward=2)
        else:
            parallelize_module(model, named["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=named["dp"], reshard_after_forward=2)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
        part: Any = x[2 * dist.get_rank() :][:2]
        if whole:
            part = distribute_tensor(x, named, [Shard(0), Replicate()])
        for _ in range(2):
            model.zero_grad()
            loss = model(part).square().sum()
            weight = model.up.weight
            assert weight.device_mesh.mesh.shape == (2, 2, 1) and weight.shape == (12, 6)
            assert bytes_unsharded(model) == 0 and bytes_kept(model) > 0
            assert torch.equal(weight.full_tensor(), reference.up.weight)
            (loss.full_tensor() if whole else loss).backward()
        reference.zero_grad()
        reference(x).square().sum().backward()
        scale = 4.0
        for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor() * scale, wanted.grad, rtol=1e-4, atol=1e-5)


def test_parameters_that_are_dtensors_before():
    run_ranks(4, check_parallel)


# ------------------------------------------------------------------ numbers that make no sense


def check_numbers() -> None:
    for number in (0, -1, 3):
        with pytest.raises(
            FSDPValueError, match=f"reshard_after_forward={number} must divide the number of ranks that shard, 4"
        ):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=number)
    own = FSDPMeshInfo(mesh_of(4))
    with pytest.raises(FSDPValueError, match="reshard_after_forward=4 must divide the number of ranks that shard, 2"):
        fully_shard(
            nn.Linear(4, 4),
            mesh=mesh_of(2, 2),
            shard_placement_fn=lambda p: ShardPlacementResult(None, own),
            reshard_after_forward=4,
        )
    # All ranks that shard are the same as True.
    model = train_alike(lambda m: shard_blocks(m, reshard_after_forward=4), steps=2)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y))
    assert bytes_kept(model) == bytes_unsharded(model) == 0 and model.embed.weight.placements == (Shard(0),)


def test_numbers_that_make_no_sense():
    run_ranks(4, check_numbers)


# ------------------------------------------------------------------ what others do with the parts


def check_after_inference() -> None:
    """An evaluation in inference mode, and then training."""

    def shard(model: Any) -> None:
        shard_blocks(model, reshard_after_forward=2)
        x, _ = next(batches(1))
        with torch.inference_mode():
            for _ in range(2):
                model(mine(x))
        for each in (*model.blocks, model):
            each.reshard()  # the optimizer is to be built from the sharded parameters

    train_alike(shard, make=lambda: Model(3))


def test_inference_mode_before_training():
    run_ranks(4, check_after_inference)


def check_penalty() -> None:
    """What is computed from the parts between forward and backward gives its gradients to nobody: an error says so."""
    torch.manual_seed(0)
    model: Any = Model(3)
    shard_blocks(model, reshard_after_forward=2)
    (x, y), *_ = batches(1)
    for _ in range(2):
        loss = loss_of(model, mine(x), mine(y))
        penalty = sum(p.square().sum() for p in model.parameters())
        with pytest.raises(FSDPError, match=r"gave gradients to the parts of parameters \('.*reshard_after_forward=n"):
            (loss + penalty.full_tensor()).backward()
    model.zero_grad()
    penalty = sum(p.square().sum() for p in model.parameters())
    (penalty.full_tensor() + loss_of(model, mine(x), mine(y))).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()

    loss = loss_of(model, mine(x), mine(y))
    penalty = sum(p.square().sum() for p in model.parameters())
    with torch.no_grad():
        for _ in range(6):  # parts that no graph needs are forgotten, however often a part is kept
            model(mine(x))
    kept = next(kept for kept in unit_of(model.blocks[0])._kept if kept is not None)
    assert len(kept._former) <= 2 * len(unit_of(model.blocks[0]).params)
    with pytest.raises(FSDPError, match=r"gave gradients to the parts of parameters \('.*reshard_after_forward=n"):
        (loss + penalty.full_tensor()).backward()


def check_optimizer_of_parts() -> None:
    """An optimizer that was built from kept parts would train nothing."""
    model: Any = shard_blocks(Model(3), reshard_after_forward=2)
    (x, y), *_ = batches(1)
    with torch.no_grad():
        model(mine(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, mine(x), mine(y)).backward()
    with pytest.raises(
        FSDPError, match=r"SGD was built while \d+ of its parameters \('.*kept by reshard_after_forward=n"
    ):
        optimizer.step()


def test_an_optimizer_of_kept_parts():
    run_ranks(4, check_optimizer_of_parts)


def test_a_penalty_on_kept_parts():
    run_ranks(4, check_penalty)
