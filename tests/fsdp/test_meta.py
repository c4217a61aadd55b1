"""Models that begin on the meta device, sharded two ways: given values by their modules, or by a checkpoint alone."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.compare import adamw, mine
from ranks import device_type, run_ranks
from terrazzo import checkpoint
from terrazzo.errors import FSDPError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("shift", torch.zeros(6))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.shift


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded_on_meta(mesh: Any) -> Any:
    """Tensor parallelism inside, a list as one group, and the rest."""
    with torch.device("meta"):
        model: Any = Stack()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard([model.norm, model.head], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_beside(model: Any, reference: Any, mesh: Any) -> None:
    ours, theirs = adamw(model), adamw(reference)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(8, 6, generator=generator)
        model(mine(x, mesh.get_local_rank("dp"))).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q[1], rtol=1e-4, atol=1e-5, msg=name)


def check_start(folder: str) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = Stack()
    checkpoint.save({"model": reference.state_dict()}, checkpoint_id=folder)

    # Each module gives its parameters values: ranks agree, and different elements have different ones.
    model = sharded_on_meta(mesh)
    model.to_empty(device=device_type())
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    assert values["layers.0.up.weight"].unique().numel() == 72 and values["head.weight"].unique().numel() == 18
    assert torch.equal(values["layers.1.norm.weight"], torch.ones(6))
    copied = copy.deepcopy(reference)
    copied.load_state_dict(values, strict=False)
    train_beside(model, copied, mesh)

    # A checkpoint gives them all, and the buffers.
    model = sharded_on_meta(mesh)
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], assign=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), reference.get_parameter(name)), name
    train_beside(model, reference, mesh)


def test_values_come_from_modules_or_from_a_checkpoint(tmp_path):
    run_ranks(4, check_start, str(tmp_path / "step"))


def with_values(model: Any) -> None:
    model.to_empty(device=device_type())
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def check_optimizer_first() -> None:
    """An optimizer that was built on the meta device trains the model: parameters stay the same objects."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded_on_meta(mesh)
    next(model.parameters()).of_user = "kept"
    optimizer = adamw(model)
    before = list(model.parameters())
    with_values(model)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert not any(p.is_meta for p in before) and before[0].of_user == "kept"
    reference = Stack()
    reference.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()}, strict=False)
    theirs = adamw(reference)
    for seed in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        model(mine(x, mesh.get_local_rank("dp"))).square().mean().backward()
        reference(x).square().mean().backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5, msg=name)


def test_an_optimizer_built_on_the_meta_device_trains_the_model():
    run_ranks(4, check_optimizer_first)


def check_replaced() -> None:
    """Where parameters become other objects, an optimizer of the former ones raises, also after its first step."""
    x = torch.randn(4, 6)
    for what in ("assign", "assign, later", "assignment"):
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 6))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if what == "assignment":
            model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
        else:
            if what == "assign, later":
                model(x)[0].square().mean().backward()
                optimizer.step()
            values = {name: nn.Parameter(p.detach() * 2) for name, p in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
        model(x)[0].square().mean().backward()
        with pytest.raises(FSDPError, match=r"parameters of the model were replaced.*'[01]\.weight"):
            optimizer.step()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = model[0].weight.full_tensor().clone()
        optimizer.step()
        assert not torch.equal(model[0].weight.full_tensor(), before), what


def test_an_optimizer_of_replaced_parameters_raises():
    run_ranks(2, check_replaced)


class Shared(nn.Module):
    """Two of its modules share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.middle = nn.Linear(6, 5), nn.Linear(5, 6, bias=False), nn.LSTM(6, 5)
        self.last = nn.Linear(5, 6, bias=False)
        self.last.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.middle(self.up(torch.tanh(self.first(x)))[None])
        return self.last(states[0])


def check_materialised_one_by_one() -> None:
    """Modules inside leave the meta device one after another, also those that share a parameter."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for whole in (False, True):
        with torch.device("meta"):
            model: Any = Shared()
        fully_shard(model, mesh=mesh["dp"])
        held = dict(model.named_parameters())
        references = [weakref.ref(p) for p in held.values()]  # with which torch.utils.swap_tensors refuses
        fired: list[str] = []
        for name, p in held.items():
            p.register_post_accumulate_grad_hook(lambda _, name=name, fired=fired: fired.append(name))
        optimizer = adamw(model)
        for module in (model,) if whole else model.children():
            module.to_empty(device=device_type(), **({} if whole else {"recurse": False}))
        torch.manual_seed(3)
        for p in held.values():
            nn.init.uniform_(p, -0.3, 0.3)
        assert model.up.weight is model.last.weight and dict(model.named_parameters()) == held
        assert all(each() is p for each, p in zip(references, held.values(), strict=True))
        reference: Any = Shared()
        reference.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
        theirs = adamw(reference)
        for seed in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            for each, rows in ((model, mine(x, mesh.get_local_rank("dp"))), (reference, x)):
                each(rows).square().mean().backward()
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        assert sorted(fired) == sorted([*held] * 3)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-5, msg=name)


def test_modules_that_leave_the_meta_device_one_by_one_keep_their_parameters():
    run_ranks(4, check_materialised_one_by_one)
