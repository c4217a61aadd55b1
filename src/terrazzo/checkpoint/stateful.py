"""Objects that know how to save and restore themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """Anything with a `state_dict` and a `load_state_dict`: modules, optimizers, data loaders, a user's own.

    `save` stores what `state_dict()` returns.  `load` calls `state_dict()` as well, fills what it returned in
    place, and hands the result to `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The object's state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the object from a state that `state_dict` returned earlier."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)


def resolve_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with every `Stateful` object, at any depth of dicts, replaced by its state.

    Objects may communicate when they are asked, so they are asked in the order of their keys: it is the same on all
    ranks, in whatever order these have put their dicts together.
    """
    resolved: dict[str, Any] = dict.fromkeys(state_dict)
    for key in _in_order(state_dict):
        value = state_dict[key]
        resolved[key] = value if isinstance(value, torch.Tensor) else _resolved(value)
    return resolved


def _resolved(value: Any) -> Any:
    if _is_stateful(value):
        return value.state_dict()
    if type(value) is dict:
        return resolve_stateful(value)
    return value


def _in_order(keys: Iterable[Any]) -> list[Any]:
    found = list(keys)
    if all(type(key) is str for key in found):  # as most are
        return sorted(found)
    return sorted(found, key=lambda key: (type(key).__name__, str(key)))


def give_back_state(state_dict: dict[str, Any], values: dict[str, Any]) -> None:
    """Hand loaded values back: to `Stateful` objects through `load_state_dict`, all others into the state dict.

    In the order of keys, as in `resolve_stateful`.
    """
    for key in _in_order(values):
        value = values[key]
        target: Any = state_dict.get(key)
        if _is_stateful(target):
            target.load_state_dict(value)
        elif isinstance(target, dict) and type(value) is dict:
            give_back_state(target, value)
        else:
            state_dict[key] = value


def _is_stateful(value: Any) -> bool:
    # Asked on the type, for a runtime protocol looks at every attribute; tensors, the many, are none.
    kind = type(value)
    return (
        not isinstance(value, (torch.Tensor, type))
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )
