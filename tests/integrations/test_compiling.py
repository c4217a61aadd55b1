"""`torch.compile` of unchanged programs under `install()`: modules that compute with DTensors are graphs, too."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import terrazzo
from ranks import fresh_values
from terrazzo.fsdp import fully_shard
from terrazzo.graphs import CompileWarning
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
OPTIONS: Any = {"backend": "aot_eager", "fullgraph": True}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def trains_as(alone: nn.Module, model: Any, named: nn.Module, steps: int = 3) -> None:
    """`model` trains as on one device; its parameters are those of `named`."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, named)]
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((alone, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(alone.named_parameters(), named.parameters(), strict=True):
        torch.testing.assert_close(whole(q.detach()), p.detach(), msg=lambda m, name=name: f"{name}: {m}")


def calls(*modules: nn.Module) -> list[list[int]]:
    return [[graph.calls for graph in terrazzo.compile_report(m).graphs] for m in modules]


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    terrazzo.install()
    # As torchtitan does: each block, in place.
    model = make()
    for block in model:
        parallelize_module(block, mesh, PLAN)
        block.compile(**OPTIONS)
        block.compile(**OPTIONS)  # nothing happens
    trains_as(make(), model, model)
    assert calls(*model) == [[3], [3]] and list(model.state_dict()) == list(make().state_dict())
    # A copy computes with its own parameters.
    before = [whole(p.detach()) for p in model.parameters()]
    other = copy.deepcopy(model)
    trains_as(copy_of(model), other, other)
    assert calls(*other) == [[3], [3]] and calls(*model) == [[3], [3]]
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(p.detach()), value)
    # And a whole model, from which a compiled one is made.
    model = parallelize_module(make(), mesh, {f"{i}.{name}": style for i in range(2) for name, style in PLAN.items()})
    compiled = torch.compile(model, **OPTIONS)
    assert compiled is not model and isinstance(compiled, nn.Sequential) and torch.compile(compiled) is compiled
    trains_as(make(), compiled, model)
    assert calls(compiled) == [[3]]
    with pytest.warns(CompileWarning, match="mode and options"):
        torch.compile(model, mode="max-autotune", backend="aot_eager")
    # What has no DTensors is PyTorch's, and so are all other calls.
    plain = make()
    assert type(torch.compile(plain, **OPTIONS)).__name__ == "OptimizedModule"
    plain.compile(**OPTIONS)
    trains_as(make(), plain, plain)
    assert "forward" not in vars(plain)
    assert type(torch.compile(model, backend="eager")).__name__ == "OptimizedModule"
    assert torch.compile(model, disable=True) is model
    assert torch.compile(lambda x: x + 1, **OPTIONS)(torch.ones(2)).tolist() == [2, 2]
    assert torch.compile(**OPTIONS)(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    terrazzo.uninstall()
    assert torch.compile.__module__ == "torch" and not hasattr(torch.compile, "__wrapped__")


def checkpointed() -> None:
    """As torchtitan does: each block in a wrapper, then compiled in place; their code reads attributes by any name."""
    mesh = init_device_mesh("cpu", (2,))
    terrazzo.install()
    model = make()
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(parallelize_module(block, mesh, PLAN))
        block.names = ("up", "down")
        block.forward = MethodType(by_names, block)
        model[i].compile(**OPTIONS)
    trains_as(make(), model, model)
    assert calls(*model) == [[3], [3]]
    # A policy that saves some results and recomputes others, in two regions of one graph.
    choose = partial(create_selective_checkpoint_contexts, saves_products)
    blocks = [checkpoint_wrapper(parallelize_module(block, mesh, PLAN), context_fn=choose) for block in make()]
    model = nn.Sequential(nn.Sequential(*blocks))
    model[0].compile(**OPTIONS)
    trains_as(make(), model, model)
    assert calls(*model) == [[3]]
    terrazzo.uninstall()


def saves_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation is torch.ops.aten.mm.default or operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def by_names(self: Any, x: torch.Tensor) -> torch.Tensor:
    up, down = (getattr(self, name) for name in self.names)
    return x + down(up(x).relu()) if callable(self.forward) else x


def copy_of(model: nn.Module) -> nn.Module:
    alone = make()
    with torch.no_grad():
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            p.copy_(whole(q.detach()))
    return alone


def sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    terrazzo.install()
    for order in ("compiled first", "sharded first", "the whole model"):
        model = make()
        for block in model:
            parallelize_module(block, mesh["tp"], PLAN)
            if order == "compiled first":
                block.compile(**OPTIONS)
            fully_shard(block, mesh=mesh["dp"])
            if order == "sharded first":
                block.compile(**OPTIONS)
        fully_shard(model, mesh=mesh["dp"])
        ran = torch.compile(model, **OPTIONS) if order == "the whole model" else model
        trains_as(make(), ran, model)
        assert calls(*model) == [[3], [3]], order
        assert torch.compile(model, **OPTIONS) is model  # its blocks are compiled
    # Of fully_shard alone, parameters are plain tensors while a block runs.
    model = make()
    for block in model:
        block.compile(**OPTIONS)
        fully_shard(block, mesh=mesh["dp"])
        block.compile(**OPTIONS)
        assert "forward" not in vars(block)
    trains_as(make(), model, model)
    terrazzo.uninstall()


def test_modules_with_dtensors_are_graphs():
    fresh_values(2, tensor_parallel)


def test_modules_in_wrappers_of_checkpointing_are_graphs():
    fresh_values(2, checkpointed)


@pytest.mark.long
def test_modules_that_are_sharded_and_tensor_parallel_are_graphs():
    fresh_values(4, sharded)
