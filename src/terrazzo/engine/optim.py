"""Making the optimizer: from a description, a function of parameters, or one that the user built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from terrazzo.engine.config import OptimizerConfig
from terrazzo.errors import EngineConfigError, EngineError

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# What DeepSpeed's own classes of these names take, and PyTorch's do not need to be told.
_DEEPSPEED_ONLY = ("torch_adam", "adam_w_mode")


def make_optimizer(
    given: OptimizerLike | None, described: OptimizerConfig | None, model: nn.Module, before: Mapping[int, str]
) -> torch.optim.Optimizer:
    """The optimizer of a sharded model.

    Args:
        before: the names of the parameters by the `id`s that they had before the model was sharded; an optimizer that
            was built then is given the parameters that took their places.
    """
    if given is not None and described is not None:
        raise EngineConfigError("an optimizer was passed, and config.optimizer describes another; keep one of them")
    if isinstance(given, torch.optim.Optimizer):
        _rebind(given, model, before)
        return given
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if given is not None:
        return given(trainable)
    if described is None:
        raise EngineConfigError("there is no optimizer: pass one, or describe it in config.optimizer")
    return _from_description(described, trainable)


def _from_description(described: OptimizerConfig, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    arguments = dict(described.params)
    name = described.type
    if name.lower() in ("adam", "adamw"):
        # In DeepSpeed's configs Adam is AdamW unless it is told otherwise, and neither decays weights by default.
        decoupled = name.lower() == "adamw" or arguments.get("adam_w_mode", True)
        name = "AdamW" if decoupled else "Adam"
        arguments.setdefault("weight_decay", 0.0)
        for key in _DEEPSPEED_ONLY:
            arguments.pop(key, None)
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        raise EngineConfigError(f"config: optimizer.type {described.type!r} is no optimizer of torch.optim")
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return kind(trainable, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineConfigError(f"config: optimizer.params do not fit {name}: {error}") from error


def _rebind(optimizer: torch.optim.Optimizer, model: nn.Module, before: Mapping[int, str]) -> None:
    """Put the sharded parameters in the places of those that they were made from."""
    if optimizer.state:
        raise EngineError(
            f"{type(optimizer).__name__} has taken steps already: pass a new one, and load a checkpoint into the engine"
        )
    now = dict(model.named_parameters(remove_duplicate=False))
    for number, group in enumerate(optimizer.param_groups):
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in before]
        if strangers:
            raise EngineError(f"param group {number} of the optimizer holds parameters of other models: {strangers}")
        group["params"] = [now[before[id(p)]] for p in group["params"]]
