"""The options of the state-dict functions, and the types that they speak of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# What a model's state dict holds: tensors (plain or distributed) and whatever a module's extra state is.
ValueType = Any
# {"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}, or its flattened form.
OptimizerStateType = dict[str, Any]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """How state dicts are read from, and written into, a model and its optimizers.

    Attributes:
        full_state_dict: every tensor is gathered; nothing in the result is distributed.
        cpu_offload: tensors are moved to the CPU.  Together with `full_state_dict` only rank 0 keeps the result,
            and every other rank gets an empty dict.
        ignore_frozen_params: leave out parameters that do not require gradients, under all of their names.
        keep_submodule_prefixes: with the deprecated `submodules`, keep their prefix in the keys.
        strict: a name that is missing or unexpected is an error.
        broadcast_from_rank0: when setting, rank 0 alone has the (full) state dict and hands out one tensor at a
            time; needs `full_state_dict`.
        flatten_optimizer_state_dict: one flat dict `state.<name>.<key>`, `param_groups.<name>.<key>`, which unlike
            the nested form can be merged between pipeline stages.
        dsd_fqn_modifiers: the name of a module method that returns {first component: child module that does not
            show in the module's state-dict keys}.

    >>> StateDictOptions(full_state_dict=True, cpu_offload=True).strict
    True
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def checked(options: StateDictOptions | None) -> StateDictOptions:
    """The options to use, after refusing a combination that cannot work."""
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError(
            "broadcast_from_rank0=True hands out rank 0's full state dict, so it needs full_state_dict=True as well"
        )
    return options


def as_tuple(optimizers: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer, several or none, as a tuple."""
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def submodule_prefixes(model: nn.Module, submodules: set[nn.Module] | None) -> dict[str, nn.Module]:
    """The attribute paths of `submodules` inside `model`."""
    wanted = set(submodules or ())
    return {name: module for name, module in model.named_modules() if module in wanted}
