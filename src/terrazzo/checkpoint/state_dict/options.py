"""The options of the state-dict functions, and their types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.errors import CheckpointValueError

# The values of a model's state dict: tensors (plain or distributed), and modules' extra states.
ValueType = Any
# PyTorch's names for other parts of these types.
FQNS_T = set[str]
PrimitiveType = torch.Tensor | Any
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
# {"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}, or its flattened form.
OptimizerStateType = dict[str, Any]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """Options for getting and setting state dicts.

    Attributes:
        full_state_dict: gather every tensor; nothing in the result is distributed.
        cpu_offload: move tensors to the CPU. Together with `full_state_dict` only rank 0 gets the result, and every
            other rank an empty dict.
        ignore_frozen_params: leave out parameters that do not require gradients, under all of their names.
        keep_submodule_prefixes: with the deprecated `submodules`, keep their prefix in the keys.
        strict: raise if a name is missing or unexpected.
        broadcast_from_rank0: when setting, only rank 0 has the (full) state dict, and broadcasts it one tensor at a
            time; needs `full_state_dict`.
        flatten_optimizer_state_dict: return one flat dict `state.<name>.<key>`, `param_groups.<name>.<key>`, which
            unlike the nested form can be merged between pipeline stages.
        dsd_fqn_modifiers: the name of a module's method that returns {first component: child module that is not in
            the keys of the module's state dict}.

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
        raise CheckpointValueError(
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
