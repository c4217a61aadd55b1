"""Tensor-parallel parameters inside: both cuts in the right order, trained alike and saved right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp.compare import adamw, mine
from ranks import device_type, run_ranks
from terrazzo.checkpoint.state_dict import set_model_state_dict
from terrazzo.errors import DTensorArgumentError, FSDPError, PlacementsError
from terrazzo.fsdp import fully_shard
from terrazzo.layout import Layout
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.experimental import local_map
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late


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
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        layer.up.weight.owner = "user"
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
    assert mesh.mesh_dim_names == ("dp", "tp") and up.shape == (12, 6) and up.owner == "user"
    assert str(list(up.placements)) == "[_StridedShard(dim=0, sf=2), Shard(dim=0)]", "as PyTorch's fully_shard shows it"
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
        assert seen.owner == "user", "the attributes of a parameter are those of its faces"
        assert torch.equal(seen.to_local(), whole["layers.0.up.weight"].chunk(2)[tp])
        looked.append(True)

    looked: list[bool] = []
    model.layers[0].up.register_forward_pre_hook(look_inside)
    model(torch.randn(2, 6))
    assert looked


def test_tensor_parallelism_cuts_first():
    run_ranks(4, check_order)


def check_order_is_never_lost() -> None:
    """What `.placements` shows is all that there is: another order is another layout, wherever placements are given."""
    torch.manual_seed(0)
    model, reference = Stack(), Stack()
    reference.load_state_dict(model.state_dict())
    parallel(model)
    x = torch.randn(2, 6)
    up = model.layers[0].up.weight
    mesh, whole = up.device_mesh, up.full_tensor().detach()
    natural = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    assert natural.placements == (Shard(0), Shard(0)) != up.placements
    assert not torch.equal(natural.to_local(), up.to_local()) or mesh.get_rank() in (0, 3)
    # Made again from its parts.
    again = DTensor.from_local(up.to_local(), mesh, up.placements)
    assert again.placements == up.placements and torch.equal(again.full_tensor(), whole)
    given = distribute_tensor(whole, mesh, list(up.placements))
    assert torch.equal(given.to_local(), up.to_local())
    for other in (up.redistribute(placements=up.placements), natural.redistribute(placements=up.placements)):
        assert torch.equal(other.to_local(), up.to_local())
    assert torch.equal(up.redistribute(placements=[Shard(0), Shard(0)]).to_local(), natural.to_local())
    assert DTensor.from_local(natural.to_local(), mesh, natural.placements).placements == natural.placements
    with pytest.raises(PlacementsError, match=r"_StridedShard\(dim=0, sf=3\) on mesh dim 0 of \(2, 2\)"):
        DTensor.from_local(up.to_local(), mesh, [type(up.placements[0])(0, split_factor=3), Shard(0)])
    # Another order is redistributed or refused.
    with pytest.raises(DTensorArgumentError, match=r"placed \[_StridedShard.*list, \[Shard\(dim=0\), Shard\(dim=0\)\]"):
        distribute_tensor(up, mesh, [Shard(0), Shard(0)])
    up.data = natural + 1
    reference.layers[0].up.weight.data += 1
    torch.testing.assert_close(model(x), reference(x))
    assert torch.equal(up.full_tensor(), whole + 1) and up._layout.shard_order(0) == (1, 0)
    with torch.no_grad():
        up.copy_(natural)
    assert torch.equal(up.full_tensor(), whole)
    model.load_state_dict({"layers.0.up.weight": natural + 2}, strict=False)
    assert torch.equal(up.full_tensor(), whole + 2)
    set_model_state_dict(model, {**model.state_dict(), "layers.0.up.weight": natural})
    assert torch.equal(up.full_tensor(), whole)
    up.grad = natural + 3
    assert torch.equal(up.grad.to_local(), distribute_tensor(whole + 3, mesh, up.placements).to_local())
    torch.optim.SGD([up], lr=1.0).step()
    torch.testing.assert_close(up.full_tensor(), torch.full_like(whole, -3.0))
    with pytest.raises(FSDPError, match="must have the shape"):
        up.data = distribute_tensor(torch.zeros(8, 6), mesh, up.placements)
        model(x)


def check_order_in_differentiated_code() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    whole = torch.arange(16.0).view(8, 2)
    weight = torch.linspace(-1, 1, 16).view(8, 2)
    first = Layout.of(mesh, [Shard(0), Shard(0)], (8, 2), order=(1, 0)).shown
    masked = []
    for placements in (first, [Shard(0), Shard(0)]):
        torch.manual_seed(0)
        images = distribute_tensor(torch.ones(8, 2, 3, 3), mesh, placements)
        masked.append(nn.functional.dropout2d(images).full_tensor())
    assert torch.equal(*masked), "the mask does not depend on the layout"
    for placements, other in ((first, [Shard(0), Shard(0)]), ([Shard(0), Shard(0)], first)):
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        w = distribute_tensor(weight, mesh, other)
        part = x.to_local(grad_placements=other)  # whose gradient is another part of the tensor
        part.backward(w.to_local())
        assert torch.equal(x.grad.full_tensor(), weight)
        x.grad = None
        torch.autograd.backward(x * 1, w)
        assert torch.equal(x.grad.full_tensor(), weight)
        for out in (placements, other):
            mapped = local_map(lambda a: a * 2, out_placements=[out], in_placements=[out], redistribute_inputs=True)
            y = mapped(x)
            assert y.placements == tuple(out) and torch.equal(y.full_tensor(), whole * 2)


def test_the_order_is_never_lost():
    run_ranks(4, check_order_is_never_lost)
    run_ranks(4, check_order_in_differentiated_code)


def check_strangers() -> None:
    other = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(
        distribute_tensor(linear.weight.detach(), init_device_mesh(device_type(), (4,)), [Replicate()])
    )
    with pytest.raises(FSDPError, match="different dims of one mesh"):
        fully_shard(linear, mesh=other["a"])
    for overlapping in ("x", "a"):  # a name that the mesh lacks, and one that it has
        mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=(overlapping,))
        linear.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        with pytest.raises(FSDPError, match="different dims of one mesh"):
            fully_shard(linear, mesh=other["b"])


def check_flattened() -> None:
    """Parameters on a dim that the root mesh does not name, also one of an equal mesh that was made apart."""
    made = [init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("dp", "cp", "tp")) for _ in range(2)]
    x, y = (torch.randn(8, n, generator=torch.Generator().manual_seed(n)) for n in (6, 3))
    for other in made:
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        model = copy.deepcopy(reference)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        inner = other["cp", "tp"]._flatten("both")
        fully_shard(parallelize_module(model, inner, plan), mesh=made[0]["dp"])
        assert model[0].weight.device_mesh.mesh_dim_names == ("dp", "both") and model[0].weight.to_local().numel() == 6
        row = made[0].get_local_rank("dp") * 4
        nn.functional.mse_loss(model(x[row : row + 4]), y[row : row + 4]).backward()
        nn.functional.mse_loss(reference(x), y).backward()
        for one, p in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().cpu(), one.grad.cpu())


def test_dims_that_the_root_mesh_does_not_name():
    run_ranks(4, check_flattened)


def test_meshes_that_have_nothing_in_common():
    run_ranks(4, check_strangers)
