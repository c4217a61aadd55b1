"""Conversion to and from PyTorch's DTensor: memory, values, gradients, orders of shards."""

from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.convert import redistribute
from terrazzo.tensor.interop import (
    convert_module,
    from_torch_dtensor,
    from_torch_placements,
    to_torch_dtensor,
    to_torch_placements,
)


def check_same_memory_and_values():
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype, size in product((torch.float32, torch.bfloat16), (8, 5, 1)):
        whole = torch.randn(size, 6).to(dtype)
        dist.broadcast(whole, 0)
        for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
            ours = distribute_tensor(whole, mesh, placements)
            converted = to_torch_dtensor(ours)
            assert type(converted) is theirs.DTensor and converted.shape == ours.shape and converted.dtype == dtype
            assert converted.to_local().data_ptr() == ours.to_local().data_ptr()
            assert torch.equal(converted.full_tensor(), whole)
            back = from_torch_dtensor(converted)
            assert back._layout is ours._layout and back.to_local().data_ptr() == ours.to_local().data_ptr()
            made = theirs.distribute_tensor(whole, mesh, to_torch_placements(placements, (2, 2)))
            assert torch.equal(from_torch_dtensor(made).full_tensor(), whole)
    with pytest.raises(DTensorError, match="Tensor"):
        from_torch_dtensor(torch.ones(2))


def check_shard_orders():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).view(8, 2)
    ours = redistribute(distribute_tensor(whole, mesh), None, [Shard(0), Shard(0)], order=(1, 0))
    assert ours._layout.order == (1, 0)
    converted = to_torch_dtensor(ours)
    assert converted.placements == (_StridedShard(0, split_factor=2), theirs.Shard(0))
    assert torch.equal(converted.full_tensor(), whole)
    assert from_torch_dtensor(converted)._layout is ours._layout
    uneven = redistribute(distribute_tensor(whole[:5].clone(), mesh), None, [Shard(0), Shard(0)], order=(1, 0))
    with pytest.raises(DTensorError, match="redistribute"):
        to_torch_dtensor(uneven)
    masked = theirs.DTensor.from_local(torch.ones(2), mesh, [_StridedShard(0, split_factor=3), theirs.Replicate()])
    with pytest.raises(DTensorError, match="does not correspond to an order"):
        from_torch_dtensor(masked)


def check_gradients():
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(20.0).view(5, 4)
    weight = torch.linspace(-1, 1, 20).view(5, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        # Through torch's DTensor and back to ours: d/dx sum(w * x^2).
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        squared = to_torch_dtensor(x) ** 2
        w = distribute_tensor(weight, mesh, [placement])
        (from_torch_dtensor(squared) * w).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * weight)
        # And the other way round.
        y = theirs.distribute_tensor(whole, mesh, to_torch_placements([placement], (4,))).requires_grad_()
        squared = from_torch_dtensor(y) ** 2
        (to_torch_dtensor(squared) * to_torch_dtensor(w)).sum().backward()
        torch.testing.assert_close(y.grad.full_tensor(), 2 * whole * weight)
    # Terms: the gradient of a sum is replicated, whichever library holds the terms.
    for through in (to_torch_dtensor, lambda t: from_torch_dtensor(to_torch_dtensor(t))):
        local = torch.full((3,), float(dist.get_rank() + 1)).requires_grad_()
        terms = through(DTensor.from_local(local, mesh, [Partial()]))
        assert terms.placements[0].is_partial()
        full = terms.full_tensor()
        assert full.tolist() == [10.0] * 3
        (full * torch.arange(3.0)).sum().backward()
        assert local.grad.tolist() == [0.0, 1.0, 2.0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale


def check_modules():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    plain = Tied()
    x = torch.randn(3, 4)
    expected = plain(x).sum()
    expected.backward()
    model = theirs.distribute_module(Tied(), mesh, lambda name, module, mesh: None)
    model.second.weight = model.first.weight  # which torch has untied
    model.load_state_dict({k: theirs.distribute_tensor(v, mesh) for k, v in plain.state_dict().items()})
    model(theirs.distribute_tensor(x, mesh)).sum().backward()
    before = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    assert convert_module(model) is model
    assert type(model.scale) is DTensor and model.first.weight is model.second.weight
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    assert {name: p.to_local().data_ptr() for name, p in model.named_parameters()} == before
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
    model.zero_grad()
    loss = model(distribute_tensor(x, mesh)).sum()
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    convert_module(model, "torch")
    assert all(type(p) is theirs.DTensor or isinstance(p, theirs.DTensor) for p in model.parameters())
    torch.testing.assert_close(model(theirs.distribute_tensor(x, mesh)).full_tensor().sum(), expected)
    with pytest.raises(ValueError, match="'torch'"):
        convert_module(model, "numpy")


def test_same_memory_and_values():
    run_ranks(4, check_same_memory_and_values)


def test_shard_orders():
    run_ranks(4, check_shard_orders)


def test_gradients():
    run_ranks(4, check_gradients)


def test_modules():
    run_ranks(2, check_modules)


class Mesh:
    """The part of a mesh that layouts need."""

    def __init__(self, *shape):
        self.shape = shape

    def get_coordinate(self):
        return (0,) * len(self.shape)


def test_every_order_survives_the_way_there_and_back():
    mesh = Mesh(2, 3, 4)
    for order in permutations(range(3)):
        for placements in product((Shard(0), Shard(1), Replicate(), Partial("max")), repeat=3):
            layout = Layout.of(mesh, placements, (24, 24), order)
            there = to_torch_placements(layout.placements, layout.mesh_shape, layout.order)
            back = from_torch_placements(there, mesh.shape)
            assert Layout.of(mesh, back[0], (24, 24), back[1]) is layout
