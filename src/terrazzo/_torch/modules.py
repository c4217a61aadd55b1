"""Modules: their registered parameters, buffers and children, without the copies of the public iterators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from terrazzo._torch.declared import attribute, later, private

for _name, _why in {
    "_parameters": "fully_shard and distribute_module exchange parameters, also tied ones and those without a value",
    "_buffers": "buffers are moved and distributed in place",
    "_modules": "the tree of modules is walked with its names, shared and empty children included",
    "_non_persistent_buffers_set": "which buffers are part of a state dict",
}.items():
    attribute(f"torch.nn.Module.{_name}", _why, there=partial(hasattr, nn.Module(), _name))

keys_found: Any = private(
    "torch.nn.modules.module._IncompatibleKeys", "set_state_dict returns what Module.load_state_dict returns"
)

attribute("torch.nn.Module._apply", "sharded modules override it, to follow moves to another device or dtype")


_contract = later(
    "torch.distributed._composable.contract",
    "PyTorch's replicate leaves modules alone that are registered there as fully_shard's",
)


def register_as_fully_sharded(module: nn.Module) -> None:
    """Make PyTorch's `replicate` of an outer module ignore the parameters of this module."""
    contract = _contract()
    module.__dict__.setdefault(contract.REGISTRY_KEY, {})["fully_shard"] = contract.RegistryItem()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that the module itself registers; changes to the dict change the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that the module itself registers; changes to the dict change the module."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that the module itself registers."""
    return module._modules


def modules_in(module: nn.Module) -> list[nn.Module]:
    """The module and all modules in it, each once, those of one level after those of the level above.

    As `modules()`, which takes five times as long: programs call setters of `fully_shard` for every micro-batch.
    """
    known: set[nn.Module | None] = {module, None}
    found = [module]
    for each in found:
        inner = each._modules
        if inner:
            for child in inner.values():
                if child not in known:
                    known.add(child)
                    found.append(child)  # type: ignore[arg-type]  # None is known
    return found


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of the module is part of its state dict."""
    return buffer not in module._non_persistent_buffers_set


attribute("torch.optim.Adam._init_group", "optimizer states are made before the first step, to load into them")


def state_maker_of(optimizer: torch.optim.Optimizer) -> Any:
    """The method with which PyTorch's own optimizers create missing state; None for other optimizers."""
    return getattr(optimizer, "_init_group", None)
