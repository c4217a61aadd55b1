"""What takes eight ranks: data parallelism in blocks, or on two dims, around tensor parallelism of two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import Model, adamw, batches, checked, loss_of, shard_blocks, train_alike, whole
from fsdp.test_kept import bytes_kept, bytes_unsharded
from ranks import fresh_values
from terrazzo.checkpoint import load, save
from terrazzo.fsdp import DataParallelMeshDims, fully_shard
from terrazzo.fsdp.report import report
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Shape = tuple[int, ...]
NAMES = {2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}


def tensor_parallel(shape: Shape, **options: Any) -> Callable[[Any], Any]:
    """Blocks that are tensor parallel along the last dim of the mesh; the others are data parallel."""

    def shard(model: Any) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])
        names = mesh.mesh_dim_names or ()
        data = mesh["dp"] if len(shape) == 2 else mesh[names[:-1]]
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return shard_blocks(model, mesh=data, **options)

    return shard


def make() -> Any:
    """Twelve hidden features: two ranks and four cut them evenly, as tensor parallelism wants."""
    return Model(2, hidden=12)


def part(batch: Tensor, parts: int) -> Tensor:
    """This rank's part of a batch that `parts` groups of neighbouring ranks share."""
    return batch.chunk(parts)[dist.get_rank() * parts // dist.get_world_size()]


def train(model: Any, reference: Any, data: int, steps: int, seed: int) -> None:
    """Both take the same steps; gradients, norms and parameters are compared in each."""
    ours, theirs = adamw(model, eps=1e-3), adamw(reference, eps=1e-3)
    for x, y in batches(steps, seed):
        loss_of(model, part(x, data), part(y, data)).backward()
        loss_of(reference, x, y).backward()
        assert_same(model, reference, lambda p: p.grad)
        for module, optimizer in ((model, ours), (reference, theirs)):
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, reference, lambda p: p)


def assert_same(model: nn.Module, reference: nn.Module, what: Callable[[Any], Any]) -> None:
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(what(p)), what(theirs[name]).detach(), rtol=1e-5, atol=1e-5, msg=name)


WAYS: list[tuple[Shape, dict[str, Any]]] = [
    ((4, 2), {"reshard_after_forward": 2}),
    ((4, 2), {"reshard_after_forward": 2, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
    ((2, 2, 2), {"reshard_after_forward": True}),
    ((2, 2, 2), {"reshard_after_forward": False}),
    ((1, 4, 2), {"reshard_after_forward": 2}),
    ((2, 4, 1), {"reshard_after_forward": 2}),
]


def check_ways(folder: str) -> None:
    for number, (shape, options) in enumerate(WAYS):
        path, data = f"{folder}/{number}", dist.get_world_size() // shape[-1]
        torch.manual_seed(0)
        model: Any = make()
        reference = copy.deepcopy(model)
        tensor_parallel(shape, **options)(model)
        with checked(model):
            train(model, reference, data, 3, seed=1)
        save({"model": model.state_dict()}, checkpoint_id=path)
        plain = {"model": make().state_dict()}
        load(plain, checkpoint_id=path)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(plain["model"][name], value, rtol=1e-5, atol=1e-5, msg=name)
        check_loaded(path, reference)
        check_between(model, options, data)


def check_loaded(path: str, reference: nn.Module) -> None:
    """A model that is sharded otherwise goes on from there."""
    torch.manual_seed(9)
    other: Any = tensor_parallel((2, 4), reshard_after_forward=False)(make())
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    train(other, copy.deepcopy(reference), 2, 2, seed=2)


def check_between(model: Any, options: dict[str, Any], data: int) -> None:
    """What modules hold between forward and backward, and what it takes."""
    if options["reshard_after_forward"] != 2:
        return
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    x, y = next(batches(1))
    model.set_coalesce_bytes(0)
    loss = loss_of(model, part(x, data), part(y, data))
    kept = {group.name: group.kept for group in report(model).groups}
    block = model.blocks[1]
    assert bytes_unsharded(block) == 0 < bytes_kept(block) == kept["blocks.1"]
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and torch.equal(p.full_tensor(), before[name]), name
    loss.backward()
    assert bytes_kept(block) == bytes_unsharded(block) == 0


# ------------------------------------------------------------------ parameters that are DTensors on all of the mesh


class Sequences(nn.Module):
    """Takes batch, positions and features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def check_on_the_whole_mesh() -> None:
    """Two ranks cut the batch, two the positions, two the features; the first four ranks together shard."""
    for names, dims, reshard in (
        (("shard", "cp", "tp"), DataParallelMeshDims(shard=("shard", "cp")), True),
        (("shard", "cp", "tp"), DataParallelMeshDims(shard=("shard", "cp")), 2),
        (("replicate", "cp", "tp"), DataParallelMeshDims(shard="cp", replicate="replicate"), False),
    ):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model: Any = Sequences()
        reference = copy.deepcopy(model)
        for linear, dim in ((model.up, 0), (model.down, 1)):

            def place(name: str, module: nn.Module, mesh: Any, dim: int = dim) -> None:
                for key, p in list(module.named_parameters(recurse=False)):
                    cut = Replicate() if key == "bias" and dim == 1 else Shard(dim)
                    placed = distribute_tensor(p.detach(), mesh, [Replicate(), Replicate(), cut])
                    setattr(module, key, nn.Parameter(placed))

            distribute_module(linear, mesh, place)
            fully_shard(linear, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        model.set_gradient_divide_factor(1.0)
        for each in (model.up, model.down):
            each.set_gradient_divide_factor(1.0)  # the loss is that of all ranks already
        ours, theirs = adamw(model, eps=1e-3), adamw(reference, eps=1e-3)
        for step in range(3):
            x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(step))
            out = model(distribute_tensor(x, mesh, [Shard(0), Shard(1), Replicate()]))
            loss, expected = out.square().mean(), reference(x).square().mean()
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss.full_tensor(), expected)
            assert_same(model, reference, lambda p: p.grad)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_same(model, reference, lambda p: p)


def check_blocks_alone() -> None:
    """Without tensor parallelism: uneven sizes, in blocks of two and of four."""
    for size in (2, 4):
        train_alike(lambda m, n=size: shard_blocks(m, reshard_after_forward=n), steps=3)


def check_all(folder: str) -> None:
    torch.set_num_threads(1)
    check_ways(folder)
    check_on_the_whole_mesh()
    check_blocks_alone()


@pytest.mark.proof
def test_eight_ranks(tmp_path):
    fresh_values(8, check_all, str(tmp_path), timeout=500)
