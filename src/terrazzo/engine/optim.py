"""Making the optimizer: from a description, from a function of parameters, or from one that the user has built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from terrazzo._meant import meant, taken
from terrazzo.engine.config import OptimizerConfig
from terrazzo.engine.optimizers import Lamb, Lion
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.optim import MuonWithAuxAdam

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_OWN = {"lamb": Lamb, "fusedlamb": Lamb, "lion": Lion}

# What optimizers take: parameters, or param groups.
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]

# Defaults of DeepSpeed's classes where PyTorch's have others.
_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
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
    if described.type.lower() == "muon":
        return _muon(described.params, trainable, {id(p): name for name, p in model.named_parameters()})
    return _from_description(described, trainable)


_OF_ADAM, _OF_MUON = ("betas", "eps", "adam_lr"), ("momentum", "muon_lr", "nesterov", "ns_steps", "adjust_lr_fn")


def _muon(arguments: Mapping[str, Any], trainable: list[Any], names: Mapping[int, str]) -> MuonWithAuxAdam:
    """Muon for matrices, and AdamW for vectors, embeddings and heads, or as the parameters' `use_muon` says."""
    shared = dict(arguments)
    if shared.pop("ns_method", "gram") not in ("gram", "standard"):
        raise EngineConfigError(
            f"config: optimizer.params.ns_method must be 'gram' or 'standard', not {arguments['ns_method']!r}"
        )
    adam = {name: shared.pop(name) for name in _OF_ADAM if name in shared}
    muon = {name: shared.pop(name) for name in _OF_MUON if name in shared}
    if unknown := shared.keys() - {"lr", "weight_decay"}:
        raise EngineConfigError(
            f"config: optimizer.params do not fit Muon: there is no {', '.join(sorted(unknown))}; there are lr, "
            f"weight_decay, ns_method, {', '.join((*_OF_MUON, *_OF_ADAM))}"
        )
    muon = {**shared, "lr": muon.pop("muon_lr", shared.get("lr", 0.02)), **muon}
    adam = {**shared, "lr": adam.pop("adam_lr", shared.get("lr", 3e-4)), **adam}
    if "betas" in adam:
        adam["betas"] = tuple(adam["betas"])
    groups = []
    for given in trainable if trainable and isinstance(trainable[0], dict) else [{"params": trainable}]:
        for use_muon, options in ((True, muon), (False, adam)):
            chosen = [p for p in given["params"] if _takes_muon(p, names[id(p)]) == use_muon]
            if chosen:
                groups.append({**options, **given, "params": chosen, "use_muon": use_muon})
    return MuonWithAuxAdam(groups)


def _takes_muon(parameter: nn.Parameter, name: str) -> bool:
    chosen = getattr(parameter, "use_muon", None)
    if chosen is None:
        chosen = parameter.ndim >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
        if chosen and parameter.ndim == 4:
            raise EngineConfigError(
                f"config: optimizer.type Muon takes batches of matrices, but {name} has 4 dims, as the weight of a "
                "convolution, which DeepSpeed flattens: set its `use_muon` to False, or to True if it is a batch"
            )
    return bool(chosen)


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
        known = ["Lamb", "Lion", "Muon", *(each for each in dir(torch.optim) if each[0].isupper())]
        raise EngineConfigError(
            f"config: optimizer.type {described.type!r} is not Lamb, Lion or Muon, nor an optimizer of torch.optim"
            f"{meant(described.type, known)}"
        )
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return kind(trainable, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineConfigError(f"config: optimizer.params do not fit {name}: {error}{taken(kind)}") from error


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
