"""Canonical names: the names of parameters in the model without wrappers.

The *shown* key of a parameter is its key in the wrapped model's `state_dict()`, into which DDP and `torch.compile` put
a component of their own. Both directions walk from the root along the components of the name. Files have each tensor
once, under one of its names (`state_of`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo._torch.modules import children_of
from terrazzo.checkpoint.plan.sharded import is_sharded
from terrazzo.checkpoint.state_dict import interop
from terrazzo.errors import UnsupportedValueError


class Names:
    """Translates between canonical names and the shown keys of one model.

    >>> names = Names(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    >>> names.canonical("module.weight"), names.shown("weight")
    ('weight', 'module.weight')
    """

    def __init__(self, model: nn.Module, modifiers: str = "_fqn_modifiers") -> None:
        self._model = model
        self._modifiers = modifiers

    def canonical(self, key: str) -> str:
        """The name without wrappers, from a shown key or an attribute path."""
        module: nn.Module | None = self._model
        name: list[str] = []
        for part in key.split("."):
            module, consumed = self._enter(module, part)
            if consumed:
                continue
            name.append(part)
            module = _child(module, part)
        return ".".join(name)

    def shown(self, name: str) -> str:
        """The key of `name` in the wrapped model's own state dict."""
        module: nn.Module | None = self._model
        key: list[str] = []
        for part in name.split("."):
            while module is not None and (wrapper := interop.wrapper_of(module)) is not None:
                if wrapper.shown:
                    key.append(wrapper.inner)
                module = getattr(module, wrapper.inner)
            key.append(part)
            module = _child(self._unhide(module, part), part)
        return ".".join(key)

    def _enter(self, module: nn.Module | None, part: str) -> tuple[nn.Module | None, bool]:
        """Step through wrappers and hidden children; returns whether `part` was the name of one of them."""
        while module is not None and (wrapper := interop.wrapper_of(module)) is not None:
            module = getattr(module, wrapper.inner)
            if part == wrapper.inner:
                return module, True
        if module is not None and part in self._hidden(module).values():
            return _child(module, part), True
        return self._unhide(module, part), False

    def _unhide(self, module: nn.Module | None, part: str) -> nn.Module | None:
        """The child that has `part` but is not in the keys, if the module declares one."""
        hidden = self._hidden(module).get(part) if module is not None else None
        return module if hidden is None else _child(module, hidden) or module

    def _hidden(self, module: nn.Module) -> Mapping[str, str]:
        declare = getattr(type(module), self._modifiers, None)
        return declare(module) if declare is not None else {}

    # -------------------------------------------------------------- tensors by name

    def aliases(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by all their canonical names."""
        members: Iterable[tuple[str, torch.Tensor]] = (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        )
        return {self.canonical(key): tensor for key, tensor in members}


def _child(module: nn.Module | None, part: str) -> nn.Module | None:
    """The child module `part`; None for a parameter, or for a key that a state-dict hook added."""
    return children_of(module).get(part) if module is not None else None


@dataclass(frozen=True)
class ModelState:
    """The persistent tensors of a model.

    Attributes:
        tensors: by canonical name, one name for each.
        aliases: the other names of tied ones, by the name that counts.
        names: translates names.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]]
    names: Names


def state_of(model: nn.Module) -> ModelState:
    """The persistent tensors of a model, which go by the names that it has without wrappers."""
    if interop.fsdp1_modules(model):
        raise UnsupportedValueError(
            "FullyShardedDataParallel has flattened the parameters of this model; use fully_shard, or gather its "
            "state dict with terrazzo.checkpoint.state_dict"
        )
    interop.reshard_all(model)
    names = Names(model)
    known = names.aliases()
    by_tensor: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        name = names.canonical(key)
        if not isinstance(value, torch.Tensor) and not is_sharded(value):
            raise UnsupportedValueError(f"{name} is a {type(value).__name__}, and safetensors files hold tensors only")
        tensor = known.get(name)
        if tensor is None:
            raise UnsupportedValueError(f"{name} is made by a hook of state_dict(), and is no tensor of the model")
        by_tensor.setdefault(id(tensor), []).append(name)
        values[id(tensor)] = tensor
    tied = tuple(_tied(model))
    tensors, aliases = {}, {}
    for number, called in by_tensor.items():
        first = next((name for name in called if not any(re.search(each, name) for each in tied)), called[0])
        tensors[first] = values[number]
        aliases[first] = tuple(name for name in called if name != first)
    return ModelState(tensors, aliases, names)


def _tied(model: nn.Module) -> Iterator[str]:
    """The patterns by which models of transformers declare tied names, which are not in files."""
    for module in model.modules():
        declared: Any = getattr(module, "_tied_weights_keys", None)
        if isinstance(declared, (dict, list, tuple, set)):
            yield from (f"(^|\\.){each}$" for each in declared)
