"""Canonical names: the names of parameters in the model without wrappers.

The *shown* key of a parameter is its key in the wrapped model's `state_dict()`, into which DDP and `torch.compile` put
a component of their own. Both directions walk from the root along the components of the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from terrazzo._torch.modules import children_of
from terrazzo.checkpoint.state_dict.interop import wrapper_of


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
            while module is not None and (wrapper := wrapper_of(module)) is not None:
                if wrapper.shown:
                    key.append(wrapper.inner)
                module = getattr(module, wrapper.inner)
            key.append(part)
            module = _child(self._unhide(module, part), part)
        return ".".join(key)

    def _enter(self, module: nn.Module | None, part: str) -> tuple[nn.Module | None, bool]:
        """Step through wrappers and hidden children; returns whether `part` was the name of one of them."""
        while module is not None and (wrapper := wrapper_of(module)) is not None:
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

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name; a shared one once, under its first name."""
        return {self.canonical(key): param for key, param in self._model.named_parameters()}

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
