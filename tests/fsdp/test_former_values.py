"""A graph of a forward before the parameters were written: backward through it raises exactly where it does on one
device. PyTorch's `fully_shard` uses the new values there, which gives gradients of nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import whole
from ranks import device_type, run_ranks
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late


class Clamped(nn.Module):
    """Writes to its own parameter in forward, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 1)
        return torch.tanh(x * self.scale)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Clamped(), nn.Linear(6, 6), nn.Linear(6, 3))


def step(module: Any, params: list[Any]) -> None:
    for p in params:
        p.grad = torch.ones_like(p) if p.grad is None else p.grad
    torch.optim.AdamW(params, lr=0.1, foreach=len(params) > 2).step()


def copy_values(module: Any, params: list[Any]) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def write_data(module: Any, params: list[Any]) -> None:
    for p in module.parameters():
        p.data.mul_(1.5)


def evaluate(module: Any, params: list[Any]) -> None:
    with torch.inference_mode():
        module(torch.ones(2, 6))


WRITES: dict[str, tuple[Callable[[Any, list[Any]], None], slice]] = {
    "nothing": (lambda module, params: None, slice(None)),
    "an optimizer": (step, slice(None)),
    "an optimizer of the last layer": (step, slice(5, None)),
    "an optimizer of the first layer": (step, slice(0, 2)),
    "load_state_dict": (copy_values, slice(None)),
    "data": (write_data, slice(None)),
    "inference": (evaluate, slice(None)),
}


POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))


def outcome(module: Any, x: Tensor, write: str) -> list[Tensor | None] | type:
    """The gradients of a loss from before the write; or the type of error."""
    function, which = WRITES[write]
    params = list(module.parameters())[which]  # before any are unsharded
    for _ in range(2):  # one usual step
        module(x).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        module.zero_grad()
    module(x).square().mean().backward()  # the gradients that the optimizer in between uses
    loss = module(x).square().mean()
    function(module, params)
    module.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        if x.device.type != "cpu":  # gathers ahead of what raised may still read the model, which is dropped now
            torch.accelerator.synchronize()
        return RuntimeError
    return [None if p.grad is None else whole(p.grad) for p in module.parameters()]


def check() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for write, reshard, together, policy in product(WRITES, (True, False), (True, False), POLICIES):
        ours = model()
        expected = outcome(copy.deepcopy(ours), x, write)
        for layer in () if together else ours:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(ours, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        found = outcome(ours, x, write)
        what = f"{write}, reshard {reshard}, together {together}, {policy}: {found} instead of {expected}"
        are_shards = dist.get_world_size() == 1 and policy.param_dtype is None
        if expected is RuntimeError and not (reshard or are_shards) and found is not RuntimeError:
            expected = outcome(model(), x, "nothing")  # the former values were still there
        if isinstance(expected, type) or isinstance(found, type):
            assert found is expected, what
        else:
            rtol, atol = (1e-5, 1e-6) if policy.param_dtype is None else (0.1, 0.05)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=what)


@pytest.mark.parametrize("world", [1, 2])
def test_backward_through_former_values(world: int) -> None:
    run_ranks(world, check)
