"""Recurrent layers and cells: equal to one device, and their first states are known without a look at their values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from terrazzo.errors import MixedTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {"proj_size": 2}),
    ("GRU", {}),
    ("RNN", {"nonlinearity": "relu"}),
]
CELLS = ["LSTMCell", "GRUCell", "RNNCell"]


def parts(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [p for part in result for p in parts(part)]


def same(result: Any, expected: Any) -> None:
    for a, b in zip(parts(result), parts(expected), strict=True):
        assert isinstance(a, DTensor)
        torch.testing.assert_close(a.full_tensor(), b)


class NoLook(torch.overrides.TorchFunctionMode):
    """Refuses to tell the value of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("__bool__", "item", "any", "all", "tolist"), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def layers_equal_one_device() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind, options in LAYERS:
        reference = getattr(nn, kind)(4, 3, **options)
        model = distribute_module(copy.deepcopy(reference), mesh)
        x = torch.randn(5, 6, 4)
        for placement in (Shard(1), Replicate()):
            with NoLook():
                result = model(distribute_tensor(x, mesh, [placement]))
            same(result, reference(x))
            same(model(input=distribute_tensor(x, mesh, [placement]), hx=None), reference(x))
        same(model(distribute_tensor(x[:, 0], mesh, [Replicate()])), reference(x[:, 0]))
    for kind in CELLS:
        reference = getattr(nn, kind)(4, 3)
        model = distribute_module(copy.deepcopy(reference), mesh)
        x = torch.randn(6, 4)
        with NoLook():
            result = model(distribute_tensor(x, mesh, [Shard(0)]))
        assert parts(result)[0].placements == (Shard(0),)  # type: ignore[attr-defined]
        same(result, reference(x))
        states = reference(x)
        placed = [distribute_tensor(s.detach(), mesh, [Shard(0)]) for s in parts(states)]
        again = model(distribute_tensor(x, mesh, [Shard(0)]), tuple(placed) if kind == "LSTMCell" else placed[0])
        same(again, reference(x, states))


def test_layers_equal_one_device() -> None:
    run_ranks(2, layers_equal_one_device)


class OwnStates(nn.GRU):
    """Makes states of its own, which need not be the same on every rank."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(input, torch.randn(1, input.shape[1], 3))


def plain_states_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(5, 6, 4), mesh, [Shard(1)])
    for make in (nn.GRU, nn.RNN):
        model = distribute_module(make(4, 3), mesh)
        for states in (torch.zeros(1, 6, 3), torch.ones(1, 6, 3)):
            with pytest.raises(MixedTensorError, match="plain Tensor"):
                model(x, states)
            with pytest.raises(MixedTensorError, match="plain Tensor"):
                model(x, hx=states)
        model(x)
    with pytest.raises(MixedTensorError, match="plain Tensor"):
        distribute_module(OwnStates(4, 3), mesh)(x)
    # What a call that failed said must not hold for the next.
    model = distribute_module(nn.GRU(4, 3), mesh)
    with pytest.raises(RuntimeError):
        model(distribute_tensor(torch.randn(5, 6, 2), mesh, [Shard(1)]))
    with pytest.raises(MixedTensorError):
        model(x, torch.ones(1, 6, 3))


def test_plain_states_of_the_caller_are_refused() -> None:
    run_ranks(2, plain_states_are_refused)


def converted_on_the_way_in() -> None:
    mesh = init_device_mesh("cpu", (2,))
    reference = nn.LSTM(4, 3)
    x = torch.randn(5, 6, 4)
    model = distribute_module(
        copy.deepcopy(reference),
        mesh,
        input_fn=lambda module, inputs, mesh: tuple(distribute_tensor(i, mesh, [Shard(1)]) for i in inputs),
    )
    same(model(x), reference(x))


def test_inputs_that_a_hook_distributes() -> None:
    run_ranks(2, converted_on_the_way_in)


def stay_as_they_are() -> None:
    """On a GPU, PyTorch's modules compare the addresses of their weights, to move them into one piece of memory."""
    mesh = init_device_mesh("cpu", (2,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "is_cuda", True)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
        model = distribute_module(nn.LSTM(4, 3), mesh)
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}
        model.flatten_parameters()
        model._apply(lambda p: p.clone())
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor) and torch.equal(p.to_local(), before[name])


def test_distributed_weights_are_not_moved_for_cudnn() -> None:
    run_ranks(2, stay_as_they_are)


@pytest.mark.parametrize("kind", [kind for kind, _ in LAYERS] + CELLS)
def test_modules_of_plain_tensors_are_left_alone(kind: str) -> None:
    model = getattr(nn, kind)(4, 3)
    x = torch.randn(6, 4) if kind in CELLS else torch.randn(5, 6, 4)
    expected = parts(model(x))
    for found in (torch.jit.script(nn.Sequential(model))(x), model(x, None), model(input=x)):
        for a, b in zip(parts(found), expected, strict=True):
            assert torch.equal(a, b)
    traced = torch.fx.symbolic_trace(nn.Sequential(model))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
