"""Keep optimizer state, and gradients, on the CPU while parameters are on the device.

Before a step the state is copied to the device, and afterwards back; the first step creates it on the device. State
that has not the size of its parameter, such as a step count, stays where the optimizer put it. A gradient is copied to
the device when `.grad` is asked for.

A gradient on the device may be set only then, too: if this rank has none, and does not know yet whether others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from terrazzo.fsdp.settings import Settings
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import BRINGS, wrap

Reached = Callable[[], bool]  # whether any rank has a gradient of a parameter; it may wait for the device

_PARKED = "_fully_shard_parks_state"  # on a sharded parameter: the settings of its group

_watching = False


def park_state_of(parameter: DTensor, settings: Settings) -> None:
    """Mark a parameter, so that optimizers' state of it is kept on the CPU between steps."""
    global _watching
    parameter.__dict__[_PARKED] = settings
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_bring)
        register_optimizer_step_post_hook(_park)


def _bring(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state, key, value, settings in _parked_state(optimizer):
        state[key] = _moved(value, to_device, settings)


def _park(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    devices = set()
    for state, key, value, settings in _parked_state(optimizer):
        state[key] = _moved(value, to_host, settings)
        if settings.pinned:
            devices.add(settings.mesh.device)
    for device in devices:  # the host may read the state at once, for instance to save it
        torch.get_device_module(device.type).current_stream(device).synchronize()


def _parked_state(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str, Tensor, Settings]]:
    """The tensors of optimizer state that are moved: their dict, key, tensor and settings."""
    settings: Settings | None
    state: dict[str, Any]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            settings = parameter.__dict__.get(_PARKED)
            if settings is None:
                continue
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    yield state, key, value, settings


class _Parked:
    """A gradient that a call gives its parameter, if it is one. The device's current stream has waited for it."""

    def __init__(self, values: Tensor, settings: Settings, reached: Reached | None) -> None:
        self.values, self._settings = values, settings
        self.exists = reached

    @torch.no_grad()
    def __call__(self, local: Tensor) -> None:
        if self.exists is not None and not self.exists():
            return
        brought = self.values.to(local.device, non_blocking=self._settings.pinned)
        if local.grad is None:
            local.grad = brought
        else:  # of a backward that reached the sharded parameter itself
            local.grad.add_(brought)


def park_gradient(parameter: DTensor, values: Tensor, settings: Settings, reached: Reached | None = None) -> None:
    """Keep these values as the gradient of a parameter without one, if any rank has `reached` it: None if it has."""
    parameter.__dict__[BRINGS] = _Parked(values, settings, reached)


def parked_gradient(parameter: DTensor, settings: Settings, reached: Reached | None) -> Tensor | None:
    """The gradient of a parameter as it is kept, to which one is added that is none unless any rank has `reached` it;
    None if there is none. One on the CPU is put there if it has been asked for."""
    if parameter._local.grad is not None:
        if not settings.parks_gradients:
            return parameter._local.grad
        gradient = parameter.grad
        assert gradient is not None
        values, parameter.grad = gradient._local.detach().cpu(), None
        park_gradient(parameter, values, settings)
    parked = parameter.__dict__.get(BRINGS)
    if parked is None:
        return None
    if parked.exists is not None:
        parked.exists = None if reached is None else _either(reached, parked.exists)  # what has ended is known then
    found: Tensor = parked.values
    return found


def _either(first: Reached, second: Reached) -> Reached:
    """Whether one of the two returns true."""
    return lambda: first() or second()


def has_gradient(parameter: DTensor) -> bool:
    """Whether the parameter has a gradient, wherever that is."""
    return parameter._local.grad is not None or BRINGS in parameter.__dict__


def _moved(value: Tensor, move: Callable[[Tensor, Settings], Tensor], settings: Settings) -> Tensor:
    if isinstance(value, DTensor):
        return wrap(move(value._local, settings), value._layout)
    return move(value, settings)


def to_device(local: Tensor, settings: Settings) -> Tensor:
    """The tensor on the device, for a step."""
    return local.to(settings.mesh.device, non_blocking=settings.pinned)


def to_host(local: Tensor, settings: Settings) -> Tensor:
    """After it."""
    if local.device.type == "cpu":
        return local
    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=settings.pinned, device="cpu")
    return host.copy_(local, non_blocking=settings.pinned)
