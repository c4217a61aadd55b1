"""The planner of `load`, which also loads values that are not in the state dicts of new objects.

A new object's state dict may lack values that it creates later: an optimizer has no state before its first step. The
saved state of an optimizer is loaded all the same. A warning lists saved values of other objects that their state dicts
do not have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.state_dict.lazy_state import complete_state, keyed_by_index
from terrazzo.checkpoint.stateful import Stateful
from terrazzo.errors import CheckpointError

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")
_TOLD: Final = 5  # names in a warning


class ObjectsPlanner(DefaultLoadPlanner):
    """Plans the load of a state whose objects may be new."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._objects = list(_objects(given, ()))

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is None or not self._objects:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        stored = metadata.state_dict_metadata
        for path, found in self._objects:
            if isinstance(found, torch.optim.Optimizer):
                _complete(found, _at(state_dict, path), ".".join(path), stored)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        beneath = tuple(".".join(path) + "." for path, _ in self._objects)
        # The names of values that each rank has for itself end in the rank.
        left = [name for name in stored if name.startswith(beneath) and name not in self.state_dict and "@" not in name]
        if left:
            names = ", ".join(left[:_TOLD]) + (f" and {len(left) - _TOLD} more" if left[_TOLD:] else "")
            LOGGER.warning("not loaded, because the state dicts of the objects do not have it: %s", names)


def _objects(state: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Stateful]]:
    """The stateful objects in a state, and their paths."""
    for key, value in state.items():
        here = (*path, str(key))
        if type(value) is dict:
            yield from _objects(value, here)
        elif not isinstance(value, (torch.Tensor, type)) and isinstance(value, Stateful):
            yield here, value


def _at(state: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = state
    for key in path:
        value = {str(name): each for name, each in value.items()}[key]
    return value


def _complete(
    optimizer: torch.optim.Optimizer, target: dict[str, Any], name: str, stored: Mapping[str, object]
) -> None:
    """Add saved state of parameters that the optimizer has not stepped to its state dict."""
    prefix = f"{name}.state."
    there = {each for each in stored if each.startswith(prefix)}
    if not there or not keyed_by_index(target):  # an optimizer with another form of state dict names all its values
        return
    try:
        whole = complete_state(optimizer, target)["state"]
    except CheckpointError as error:  # a warning will list what is not loaded
        LOGGER.warning("%s: %s", name, error)
        return
    for number, entry in whole.items():
        wanted = {key: value for key, value in entry.items() if f"{prefix}{number}.{key}" in there}
        if wanted and not target["state"].get(number):
            target["state"][number] = wanted
