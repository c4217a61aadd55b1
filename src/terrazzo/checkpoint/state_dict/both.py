"""State dicts of a model and its optimizers together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from terrazzo._torch.modules import keys_found
from terrazzo.checkpoint.state_dict.model import get_model_state_dict, set_model_state_dict
from terrazzo.checkpoint.state_dict.optim import get_optimizer_state_dict, set_optimizer_state_dict
from terrazzo.checkpoint.state_dict.options import Optimizers, OptimizerStateType, StateDictOptions, ValueType, as_tuple
from terrazzo.errors import CheckpointMismatchError


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers | None,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """The state dicts of a model and its optimizers, ready for `terrazzo.checkpoint.save` or `load`.

    Keys are the names of parameters in the unwrapped model, so a state dict of one parallelism can be loaded with
    another.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    >>> sorted(weights) == sorted(moments["state"])
    True
    """
    every = as_tuple(optimizers)
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    state = get_optimizer_state_dict(model, every, submodules=submodules, options=options) if every else {}
    return weights, state


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers | None,
    *,
    model_state_dict: Mapping[str, ValueType] | Mapping[nn.Module, Mapping[str, ValueType]] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a model's and its optimizers' state dicts; returns the model's `missing_keys` and `unexpected_keys`.

    An empty `model_state_dict` leaves the model unchanged (with `broadcast_from_rank0`, only if rank 0's is empty).

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> adam = torch.optim.AdamW(model.parameters())
    >>> weights, moments = get_state_dict(model, adam)
    >>> set_state_dict(model, adam, model_state_dict=weights, optim_state_dict=moments)
    <All keys matched successfully>
    """
    every = as_tuple(optimizers)
    from_rank0 = options is not None and options.broadcast_from_rank0
    if every:
        if not optim_state_dict and not from_rank0:
            raise CheckpointMismatchError("optimizers were passed, but optim_state_dict is empty: pass their state")
        set_optimizer_state_dict(model, every, optim_state_dict, options=options)
    if not model_state_dict and not from_rank0:
        return keys_found([], [])
    return set_model_state_dict(model, model_state_dict, options=options)
