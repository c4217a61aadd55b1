"""Parameters stay the same objects when `.data` is set, also by `nn.Module`'s methods for another device or dtype."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ranks import device_type, run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def layers(device: str) -> Any:
    """Two of the three share a parameter, and two a buffer."""
    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
        model[0].register_buffer("scale", torch.ones(5))
    model[2].weight = model[0].weight
    model[2].scale = model[0].scale
    return model


def distributed(model: Any, mesh: Any) -> Any:
    """Uneven shards; of the last parameter one rank has none."""
    for module in (model[0], model[1]):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0), Shard(1)]))
    model[1].bias = nn.Parameter(distribute_tensor(model[1].bias.detach(), mesh, [Replicate(), Shard(0)]))
    model[2].weight = model[0].weight
    model[0].scale = model[2].scale = distribute_tensor(model[0].scale, mesh, [Replicate(), Shard(0)])
    return model


def set_values(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            values = torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.device, p.dtype)
            p.copy_(distribute_tensor(values, p.device_mesh, p.placements) if isinstance(p, DTensor) else values)
        model[0].scale = torch.ones_like(model[0].scale, device=model[0].weight.device)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    w = model[0].weight
    x = torch.linspace(-1, 1, 10).view(2, 5).to(w.device, w.dtype)
    if isinstance(w, DTensor):
        x = distribute_tensor(x, w.device_mesh, [Replicate(), Replicate()])
    optimizer.zero_grad()
    (model(x) * model[0].scale).square().mean().backward()
    optimizer.step()


MOVES: dict[str, tuple[str, Callable[[Any, str], object]]] = {
    "to_empty": ("meta", lambda m, device: m.to_empty(device=device)),
    "to_empty of each": ("meta", lambda m, device: [each.to_empty(device=device, recurse=False) for each in m]),
    "_apply": ("meta", lambda m, device: m._apply(lambda t: torch.zeros_like(t, device=device))),
    "to meta, and back": ("values", lambda m, device: m.to("meta").to_empty(device=device)),
    "to": ("values", lambda m, device: m.to(device)),
    "double": ("values", lambda m, device: m.double()),
    "to dtype": ("values", lambda m, device: m.to(torch.float64)),
    ".data": ("meta", lambda m, device: [p.set_(torch.zeros_like(p, device=device)) for p in m.parameters()]),
}


def check_moves() -> None:
    mesh, device = init_device_mesh(device_type(), (2, 2)), device_type()
    for name, (begin, move) in MOVES.items():
        for trained in (False, True) if begin == "values" else (False,):
            model = distributed(layers("meta" if begin == "meta" else device), mesh)
            plain = layers(device)
            optimizers = [torch.optim.SGD(each.parameters(), 1e-3, momentum=0.5) for each in (model, plain)]
            held = dict(model.named_parameters())
            placements = [p.placements for p in held.values()]
            weak, fired, gradients = [weakref.ref(p) for p in held.values()], Counter[str](), {}
            handles = [p.register_hook(lambda _, fired=fired: fired.update(["hook"])) for p in held.values()]
            for n, p in held.items():
                p.mine = n
                p.register_post_accumulate_grad_hook(lambda _, fired=fired: fired.update(["after"]))
            if trained:
                set_values(model)
                step(model, optimizers[0])
                gradients = {n: p.grad for n, p in held.items()}
            move(model, device)
            assert dict(model.named_parameters()) == held and model[2].weight is model[0].weight, name
            for n, p in held.items():
                assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad and p.mine == n
                assert p.device.type == device and (p.grad is None or p.grad is gradients[n])
                assert p.grad is None or (p.grad.device, p.grad.dtype) == (p.device, p.dtype)
            assert [p.placements for p in held.values()] == placements
            assert all(each() is p for each, p in zip(weak, held.values(), strict=True))
            plain.to(model[0].weight.dtype)
            optimizers = [torch.optim.SGD(each.parameters(), 1e-3, momentum=0.5) for each in (model, plain)]
            fired.clear()
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                set_values(each)
                for _ in range(2):
                    step(each, optimizer)
            assert fired == {"hook": 2 * len(held), "after": 2 * len(held)}, (name, fired)
            handles[0].remove()
            step(model, optimizers[0])
            step(plain, optimizers[1])
            assert fired == {"hook": 3 * len(held) - 1, "after": 3 * len(held)}, (name, fired)
            for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.full_tensor(), q, msg=lambda text, name=name, n=n: f"{name}: {n}: {text}")


def check_parallelized() -> None:
    """A model that is parallelized on the meta device; the optimizer is there before its values."""
    mesh, device = init_device_mesh(device_type(), (4,)), device_type()
    model = parallelize_module(layers("meta"), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model.to_empty(device=device)
    set_values(model)
    before = model[0].weight.full_tensor().clone()
    model[0].weight.sum().backward()
    optimizer.step()
    assert model[2].weight is model[0].weight
    assert (before != model[2].weight.full_tensor()).all()


def check_graphs_and_gradients() -> None:
    mesh = init_device_mesh(device_type(), (4,))

    def parameter(device: str | None = None) -> Any:
        return nn.Parameter(distribute_tensor(torch.arange(5.0, device=device), mesh, [Shard(0)]))

    # A graph of before has nowhere to put its gradient.
    p = parameter()
    total = p.square().sum()
    p.data = p.data.to("meta")
    with pytest.raises(DTensorError, match="moved to or from the meta device after the forward"):
        total.backward()
    p = parameter()
    total = p.square().sum()
    with pytest.raises(RuntimeError, match="holding references|poisoned"):
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 2))
        total.backward()

    # A gradient comes along, and its values, where a device has them.
    p = parameter()
    p.square().sum().backward()
    grad = p.grad
    p.data = p.data.to("meta")
    assert p.grad is grad and grad.is_meta and grad.placements == (Shard(0),)
    p.data = parameter().data
    assert p.grad is grad and not grad.is_meta and not grad.full_tensor().any()

    # Another layout, and what is known of strides where a rank has no elements.
    p = nn.Parameter(distribute_tensor(torch.ones(1, 6, device="meta"), mesh, [Shard(0)]))
    p.data = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(1)])
    assert p.shape == (4, 3) and p.placements == (Shard(1),) and p.requires_grad and p.is_leaf
    p.square().sum().backward()
    torch.testing.assert_close(p.grad.full_tensor(), 2 * torch.arange(12.0).view(4, 3))
    x, y = torch.ones(1, 6), torch.ones(6, 1).t()
    rows = distribute_tensor(x, mesh, [Shard(0)])
    rows.data = distribute_tensor(torch.ones(6, 3), mesh, [Shard(1)]).t()
    assert rows.stride() == torch.ones(6, 3).t().stride() and not rows.is_contiguous(), (x, y)


def check_subclasses() -> None:
    """Of a tensor subclass the tensors inside are exchanged, too."""
    mesh = init_device_mesh("cpu", (4,))
    own = TwoTensor(torch.ones(2, 3), 2 * torch.ones(2, 3))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))
    before = model.weight
    model.double()
    assert model.weight is before and before.dtype is torch.float64
    local = before.to_local().detach()
    assert local.a.dtype is torch.float64 and local.b.dtype is torch.float64
    torch.testing.assert_close(local.b, 2 * torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.on_late
def test_moved_parameters_stay_the_same_objects():
    run_ranks(4, check_moves)


def check_the_rest() -> None:
    check_parallelized()
    check_graphs_and_gradients()
    check_subclasses()


def test_gradients_graphs_layouts_and_subclasses_of_moved_parameters():
    run_ranks(4, check_the_rest)
