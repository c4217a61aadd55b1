"""`Stateful`: objects with a `state_dict` and a `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from terrazzo.checkpoint.plan.flatten import walking
from terrazzo.errors import UnsupportedValueError


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`: modules, optimizers, data loaders, a user's own.

    `save` stores the result of `state_dict()`. `load` calls `state_dict()` too, fills the result in place, and passes
    it to `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The object's state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the object's state to one that `state_dict` returned earlier."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)


def resolve_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with every `Stateful` object, at any depth of dicts, replaced by its state.

    `state_dict()` may communicate, so the objects are called in the order of their keys, which is the same on all ranks
    even if their dicts have different orders.
    """
    if not isinstance(state_dict, Mapping):
        raise UnsupportedValueError(f"a state is a dict of names and values, not {type(state_dict).__name__}")
    with walking(state_dict):
        return _all_resolved(state_dict)


def _all_resolved(state: Mapping[str, Any]) -> dict[str, Any]:
    resolved: dict[str, Any] = dict.fromkeys(state)
    for key in _in_order(state):
        value = state[key]
        if _is_stateful(value):
            value = value.state_dict()
        elif type(value) is dict:
            value = _all_resolved(value)
        resolved[key] = value
    return resolved


def _in_order(keys: Iterable[Any]) -> list[Any]:
    found = list(keys)
    if all(type(key) is str for key in found):  # as most are
        return sorted(found)
    return sorted(found, key=lambda key: (type(key).__name__, str(key)))


def give_back_state(state_dict: dict[str, Any], values: dict[str, Any]) -> None:
    """Set loaded values: of `Stateful` objects by `load_state_dict`, of all others in the state dict.

    Objects are called in the order of their keys, as in `resolve_stateful`.
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
    # Tensors first, because there are many. On the type, because isinstance() of a protocol looks up all attributes.
    kind = type(value)
    return (
        not isinstance(value, (torch.Tensor, type))
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )
