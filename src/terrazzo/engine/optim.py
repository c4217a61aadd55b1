"""Making the optimizer: from a description, from a function of parameters, or from one that the user has built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from terrazzo.engine.config import OptimizerConfig
from terrazzo.engine.optimizers import Lamb, Lion
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.optim import Muon

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_OWN = {"lamb": Lamb, "fusedlamb": Lamb, "lion": Lion, "muon": Muon}

# What optimizers take: parameters, or param groups.
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

# Defaults of DeepSpeed's classes where PyTorch's have others.
_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "muon": {"lr": 0.02, "weight_decay": 0.0},
}


def make_optimizer(
    given: OptimizerLike | None,
    described: OptimizerConfig | None,
    model: nn.Module,
    before: Mapping[int, str],
    parameters: Parameters | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a sharded model.

    Args:
        before: the names of the parameters by the `id`s that they had before the model was sharded; in an optimizer
            that was built then, they are replaced by the sharded parameters.
        parameters: the parameters to train, or param groups, from before the model was sharded; None: all that require
            gradients.
    """
    if given is not None and described is not None:
        raise EngineConfigError("an optimizer was passed, and config.optimizer describes another; use one of them")
    if isinstance(given, torch.optim.Optimizer):
        _rebind(given, model, before)
        return given
    trainable = _chosen(parameters, model, before)
    if given is not None:
        return given(trainable)
    if described is None:
        raise EngineConfigError("there is no optimizer: pass one, or describe it in config.optimizer")
    return _from_description(described, trainable)


def _from_description(described: OptimizerConfig, trainable: list[Any]) -> torch.optim.Optimizer:
    arguments = dict(described.params)
    name = described.type
    if not arguments.pop("torch_adam", False):  # which asks for PyTorch's class, and so for its defaults
        arguments = {**_DEFAULTS.get(name.lower(), {}), **arguments}
    decoupled = arguments.pop("adam_w_mode", True)
    if name.lower() in ("adam", "adamw"):
        # In DeepSpeed's configs Adam means AdamW unless adam_w_mode is false.
        name = "AdamW" if name.lower() == "adamw" or decoupled else "Adam"
        if not arguments.pop("bias_correction", True):
            raise EngineConfigError(
                "config: optimizer.params.bias_correction false is not supported: leave it out, or use Lamb"
            )
    kind = _OWN.get(name.lower()) or getattr(torch.optim, name, None) or getattr(torch.optim, name.capitalize(), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        raise EngineConfigError(f"config: optimizer.type {described.type!r} is not an optimizer of torch.optim")
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return kind(trainable, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineConfigError(f"config: optimizer.params do not fit {name}: {error}") from error


def _chosen(parameters: Parameters | None, model: nn.Module, before: Mapping[int, str]) -> list[Any]:
    """What the optimizer is built from: parameters of the sharded model, or groups of them."""
    if parameters is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    given: list[Any] = list(parameters)
    now = dict(model.named_parameters(remove_duplicate=False))
    if not given or not isinstance(given[0], dict):
        return [p for p in _replaced(given, now, before, "model_parameters") if p.requires_grad]
    groups = []
    for number, group in enumerate(given):
        inside = group["params"]
        inside = [inside] if isinstance(inside, torch.Tensor) else list(inside)
        replaced = _replaced(inside, now, before, f"param group {number}")
        groups.append({**group, "params": [p for p in replaced if p.requires_grad]})
    return [group for group in groups if group["params"]]


def _replaced(
    parameters: list[nn.Parameter], now: Mapping[str, nn.Parameter], before: Mapping[int, str], where: str
) -> list[nn.Parameter]:
    """The sharded parameters that were made from these parameters."""
    here = {id(p) for p in now.values()}
    strangers = [tuple(p.shape) for p in parameters if id(p) not in before and id(p) not in here]
    if strangers:
        raise EngineError(f"{where} has parameters that are not in the model, of shapes {strangers}")
    return [p if id(p) in here else now[before[id(p)]] for p in parameters]


def _rebind(optimizer: torch.optim.Optimizer, model: nn.Module, before: Mapping[int, str]) -> None:
    """Replace the optimizer's parameters by the sharded parameters that were made from them."""
    if optimizer.state:
        raise EngineError(
            f"{type(optimizer).__name__} has taken steps already: pass a new optimizer, and load a checkpoint into the "
            "engine"
        )
    now = dict(model.named_parameters(remove_duplicate=False))
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = _replaced(group["params"], now, before, f"param group {number} of the optimizer")
