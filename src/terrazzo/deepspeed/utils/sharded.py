"""Parameters, gradients and optimizer states of a parameter: whole on every rank, or this rank's part.

Functions for whole tensors must be called on all ranks. Gradients exist between `backward` and `step`; they are
returned as the step uses them, without the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.deepspeed.engines import accumulated, as_sharded, engine_of, show_again
from terrazzo.errors import EngineValueError
from terrazzo.tensor import DTensor, distribute_tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, as a copy."""
    detached = tensor.detach()
    return detached.full_tensor().clone() if isinstance(detached, DTensor) else detached.clone()


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Write to a tensor from a whole one, which every rank has."""
    if tuple(value.shape) != tuple(target.shape):
        raise EngineValueError(
            f"a value of shape {tuple(value.shape)} cannot be written to a tensor of shape {tuple(target.shape)}"
        )
    plain = value.detach().to(target.device, target.dtype)
    if isinstance(target, DTensor):
        plain = distribute_tensor(plain, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(plain)


@torch.no_grad()
def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _copy_part(target: Tensor, value: Tensor) -> None:
    local = _part(target)
    local.copy_(value.to(local.device, local.dtype).reshape(local.shape))


def _state(param: Tensor, name: str) -> Tensor | None:
    engine = engine_of(param)
    found = None if engine is None else engine.optimizer.state.get(param, {}).get(name)
    return found if isinstance(found, Tensor) else None


def _scale(param: Tensor) -> float:
    engine = engine_of(param)
    return 1.0 if engine is None else engine.gradient_scale


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole parameter, in the precision in which it is trained; None if it is frozen."""
    param = as_sharded(param)
    return whole(param).float() if param.requires_grad else None


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the parameter from a whole tensor."""
    param = as_sharded(param)
    copy_into(param, value)
    show_again([param])


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient, averaged over the ranks; None if there is none.

    Inside `no_sync()` it is what this rank has accumulated.
    """
    sharded = as_sharded(param)
    found = accumulated(param) if sharded.grad is None else sharded.grad
    return None if found is None else whole(found) / _scale(sharded)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the gradient."""
    sharded = as_sharded(param)
    found = accumulated(param) if sharded.grad is None else sharded.grad
    if found is None:
        raise EngineValueError("the parameter has no gradient: set it between backward and step")
    copy_into(found, value * _scale(sharded))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The whole of a state that the optimizer keeps, such as `exp_avg`; None before its first step."""
    param = as_sharded(param)
    found = _state(param, optim_state_key)
    return None if found is None else whole(found)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state of the optimizer from a whole tensor."""
    param = as_sharded(param)
    copy_into(_needed(param, optim_state_key), value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the parameter; None if it is frozen."""
    param = as_sharded(param)
    return _part(param.detach()).clone() if param.requires_grad else None


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's part of the parameter."""
    param = as_sharded(param)
    _copy_part(param.detach(), value)
    show_again([param])


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient; None if there is none."""
    param = as_sharded(param)
    return None if param.grad is None else _part(param.grad) / _scale(param)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replace this rank's part of the gradient."""
    param = as_sharded(param)
    if param.grad is None:
        raise EngineValueError("the parameter has no gradient: set it between backward and step")
    _copy_part(param.grad, value * _scale(param))


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of a state that the optimizer keeps; None before its first step."""
    param = as_sharded(param)
    found = _state(param, optim_state_key)
    return None if found is None else _part(found).clone()


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a state of the optimizer."""
    param = as_sharded(param)
    _copy_part(_needed(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace gradients by the result of a function of them."""
    for param in param_list:
        found = safe_get_full_grad(param)
        if found is not None:
            safe_set_full_grad(param, update_func(found, param))


def _needed(param: Tensor, name: str) -> Any:
    found = _state(param, name)
    if found is None:
        raise EngineValueError(f"the optimizer has no state {name!r} for this parameter; it may not have stepped yet")
    return found
