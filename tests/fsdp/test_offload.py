"""What rests on the CPU: all that is sharded, or only the optimizer's state.

On a CPU mesh nothing moves, so here copies stand for the moves; the last tests are for accelerators.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy as PyTorchs

from device_ranks import run_on_devices
from fsdp.compare import Model, batches, loss_of, mine, shard_blocks, train_alike
from ranks import device_type, run_ranks
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, offload
from terrazzo.fsdp.group import group_of
from terrazzo.tensor import DTensor, init_device_mesh

pytestmark = pytest.mark.on_late(both=True)

STATE_ONLY = CPUOffloadPolicy(parameters=False)
GRADIENTS_TOO = CPUOffloadPolicy(parameters=False, gradients=True)


def test_policies():
    assert CPUOffloadPolicy() == CPUOffloadPolicy(True) and isinstance(CPUOffloadPolicy(), OffloadPolicy)
    assert CPUOffloadPolicy(False).pin_memory is False
    with pytest.raises(FSDPValueError, match="parameters=True, optimizer_state=False.*Use optimizer_state=True"):
        CPUOffloadPolicy(optimizer_state=False)
    with pytest.raises(TypeError):
        CPUOffloadPolicy(True, False)


def adam(**options: Any) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def check_state_only() -> None:
    """Copies stand for moves: every step begins with bringing all there is, and ends with parking it."""
    brought: list[Tensor] = []
    parked: list[Tensor] = []

    def bring(local: Tensor, settings: object) -> Tensor:
        assert any(local is known for known in parked), "what comes was parked"
        brought.append(local.clone())
        local.fill_(torch.nan)  # nobody uses what lies on the host
        return brought[-1]

    def park(local: Tensor, settings: object) -> Tensor:
        parked.append(local.clone())
        local.fill_(torch.nan)
        return parked[-1]

    before = offload.to_device, offload.to_host
    offload.to_device, offload.to_host = bring, park
    try:
        for make, tensors in (
            (adam(), 2),
            (adam(foreach=False, amsgrad=True), 3),
            (adam(fused=True), 2),
            (momentum, 1),
        ):
            brought.clear()
            parked.clear()
            model = train_alike(lambda m: shard_blocks(m, offload_policy=STATE_ONLY), optimizer=make)
            count = len(list(model.parameters())) * tensors
            assert len(parked) == 10 * count and len(brought) == 9 * count
    finally:
        offload.to_device, offload.to_host = before


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_state_is_brought_for_each_step(world):
    run_ranks(world, check_state_only)


def check_other_optimizers() -> None:
    """Of others' parameters, and of those that rest on the CPU anyhow, nothing is moved."""

    def never(local: Tensor, settings: object) -> Tensor:
        raise AssertionError("moved")

    before = offload.to_device, offload.to_host
    offload.to_device, offload.to_host = never, never
    try:
        for policy in (OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(parameters=False, optimizer_state=False)):
            train_alike(lambda m, policy=policy: shard_blocks(m, offload_policy=policy), steps=2)
    finally:
        offload.to_device, offload.to_host = before


def test_only_what_the_policy_says_is_moved():
    run_ranks(2, check_other_optimizers)


def check_plain() -> None:
    for policy in (STATE_ONLY, GRADIENTS_TOO, CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        model = train_alike(lambda m, policy=policy: shard_blocks(m, offload_policy=policy))
        resting = "cpu" if policy.parameters else device_type()
        assert all(p.device.type == resting for p in model.parameters())


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.on_late(sample=True)
def test_offloading_from_cpu_to_cpu(world):
    run_ranks(world, check_plain)


def check_pytorchs() -> None:
    mesh = init_device_mesh(device_type(), (1,))
    for pinned in (True, False):
        model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=PyTorchs(pin_memory=pinned))
        assert group_of(model).settings.offload == CPUOffloadPolicy(pinned)


def test_pytorchs_policy_is_one():
    run_ranks(1, check_pytorchs)


# ------------------------------------------------------------------ gradients on the host


def check_gradients(ask: bool, hooks: bool) -> None:
    """Backwards that are reduced add gradients on the host; who asks for one between them, or has a hook, gets it, on
    its parameter's device, and nothing is lost."""
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model, offload_policy=GRADIENTS_TOO)
    seen: list[torch.device] = []
    if hooks:
        for p in model.parameters():
            p.register_hook(lambda grad: seen.append(grad.device) or grad * 2)
        for p in reference.parameters():
            p.register_hook(lambda grad: grad * 2)
    for x, y in batches(3):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert p._local.grad is None, "it is not on the device"
            if ask:
                assert_gradient(p, expected.grad)
                assert p._local.grad is not None
    assert all(device.type == device_type() for device in seen) and bool(seen) is hooks
    sum(p.square().sum() for p in model.parameters()).full_tensor().backward()  # reaches the shards themselves
    sum(p.square().sum() for p in reference.parameters()).backward()
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if not hooks:
            assert_gradient(p, expected.grad)
    model.zero_grad()
    assert all(p._local.grad is None and p.grad is None for p in model.parameters())
    next(iter(model.parameters())).grad = None


def assert_gradient(p: Any, expected: Tensor) -> None:
    assert p.grad.device == p.device and p.grad.device.type == device_type()
    torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_are_on_the_host_until_they_are_asked_for(world):
    for ask, hooks in ((False, False), (True, False), (True, True)):
        run_ranks(world, check_gradients, ask, hooks)


# ------------------------------------------------------------------ on an accelerator


def check_devices(device: torch.device) -> None:
    mesh, kind = init_device_mesh(device.type, (dist.get_world_size(),)), device.type
    policies = (STATE_ONLY, kind), (GRADIENTS_TOO, kind), (PyTorchs(), "cpu"), (OffloadPolicy(), kind)
    for policy, where in policies:
        torch.manual_seed(0)
        model = Model(3, 64, 256)
        reference = copy.deepcopy(model).to(device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        model.to(where)
        ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
        for x, y in batches(5, ranks=1):
            for module, optimizer in ((model, ours), (reference, theirs)):
                loss_of(module, x.to(device), y.to(device)).backward()  # every rank has the same data
                if module is model and policy is GRADIENTS_TOO:
                    assert all(p._local.grad is None for p in model.parameters())
                optimizer.step()
        resting = kind if type(policy) is OffloadPolicy else "cpu"
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            state = ours.state[parameter]["exp_avg"]
            assert parameter.device.type == parameter.grad.device.type == where
            assert isinstance(state, DTensor) and state.device.type == resting
            pinned = policy in (STATE_ONLY, GRADIENTS_TOO) and state.to_local().numel() > 0
            assert state.to_local().is_pinned() == pinned
            part = expected.detach()[parameter._layout.box().slices()]
            torch.testing.assert_close(parameter.to_local().to(device), part, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_where_everything_rests():
    run_on_devices(check_devices)
