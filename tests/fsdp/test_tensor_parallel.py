"""Tensor-parallel parameters inside: both cuts in the right order, trained alike and saved right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp.compare import adamw, mine
from ranks import run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import fully_shard
from terrazzo.layout import Layout
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallel(model: Stack, placement: object = None) -> Stack:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh["dp"])


def check_training() -> None:
    for placement in (None, lambda p: Shard(p.ndim - 1)):
        torch.manual_seed(0)
        model = Stack()
        reference = copy.deepcopy(model)
        parallel(model, placement)
        ours, theirs = adamw(model), adamw(reference)
        generator = torch.Generator().manual_seed(1)
        dp = model.head.weight.device_mesh.get_local_rank()
        for _ in range(10):
            x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
            loss = ((model(mine(x, dp)) - mine(y, dp)) ** 2).mean()
            loss.backward()
            ((reference(x) - y) ** 2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-5, atol=1e-5)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-5, atol=1e-5, msg=name)


def test_training_on_two_dims():
    run_ranks(4, check_training)


def check_order() -> None:
    """Tensor parallelism cuts first: each of its parts is what data parallelism cuts further."""
    torch.manual_seed(0)
    model = Stack()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallel(model)
    up = model.layers[0].up.weight
    mesh = up.device_mesh
    assert mesh.mesh_dim_names == ("dp", "tp") and up.placements == (Shard(0), Shard(0)) and up.shape == (12, 6)
    dp, tp = mesh.get_coordinate()
    expected = whole["layers.0.up.weight"].chunk(2)[tp].chunk(2)[dp]
    assert torch.equal(up.to_local(), expected)
    assert up._layout is Layout.of(mesh, (Shard(0), Shard(0)), (12, 6), order=(1, 0))
    chunk = up.__create_chunk_list__()[0]
    assert tuple(chunk.offsets) == (tp * 6 + dp * 3, 0) and tuple(chunk.sizes) == (3, 6)
    down = model.layers[0].down.weight
    assert down.placements == (Shard(0), Shard(1))
    assert torch.equal(down.to_local(), whole["layers.0.down.weight"].chunk(2, 1)[tp].chunk(2)[dp])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name

    def look_inside(module: nn.Linear, args: object) -> None:
        seen = module.weight
        assert isinstance(seen, DTensor) and seen.placements == (Shard(0),) and seen.device_mesh == mesh["tp"]
        assert torch.equal(seen.to_local(), whole["layers.0.up.weight"].chunk(2)[tp])
        looked.append(True)

    looked: list[bool] = []
    model.layers[0].up.register_forward_pre_hook(look_inside)
    model(torch.randn(2, 6))
    assert looked


def test_tensor_parallelism_cuts_first():
    run_ranks(4, check_order)


def check_strangers() -> None:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(
        distribute_tensor(linear.weight.detach(), init_device_mesh("cpu", (4,)), [Replicate()])
    )
    with pytest.raises(FSDPError, match="different dims of one mesh"):
        fully_shard(linear, mesh=other["a"])


def test_meshes_that_have_nothing_in_common():
    run_ranks(4, check_strangers)
