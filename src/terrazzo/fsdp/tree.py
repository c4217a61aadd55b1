"""Tensors in modules' inputs and outputs: nested lists, tuples, sets, mappings, dataclasses and PyTorch's pytrees."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from terrazzo._torch.dispatching import tree_flatten, tree_unflatten

_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes])


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], copies: Copies | None = None) -> Any:
    """`value` with `function` applied to each tensor in it; the same object if that changes nothing.

    `copies` notes containers that were copied for that, and that can be changed.

    >>> import torch
    >>> map_tensors({"x": [torch.ones(2)], "n": 3}, lambda t: t + 1)
    {'x': [tensor([2., 2.])], 'n': 3}
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple | list | set | frozenset):
        items = [map_tensors(item, function, copies) for item in value]
        if _same(items, value):
            return value
        made = _rebuilt_sequence(value, items)
        return made if isinstance(value, tuple | frozenset) else _noted(value, made, copies)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function, copies) for key, item in value.items()}
        if _same(mapped.values(), value.values()):
            return value
        return _noted(value, mapped if kind is dict else _rebuilt_mapping(value, mapped), copies)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        mapped = {name: map_tensors(item, function, copies) for name, item in fields.items()}
        changed = {name: item for name, item in mapped.items() if item is not fields[name]}
        return _noted(value, _with_fields(value, changed), copies) if changed else value
    parts, node = tree_flatten(value, is_leaf=lambda part: part is not value)  # a deque, and what users have registered
    items = [part if part is value else map_tensors(part, function, copies) for part in parts]
    return value if _same(items, parts) else _noted(value, tree_unflatten(items, node), copies)


def _noted(original: Any, copied: Any, copies: Copies | None) -> Any:
    if copies is not None:
        copies.note(original, copied)
    return copied


def _same(new: Any, old: Any) -> bool:
    return all(map(is_, new, old))


def _rebuilt_sequence(value: Any, items: list[Any]) -> Any:
    """A sequence or set of the same class with these items."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(items)
    if hasattr(kind, "_make"):
        return kind._make(items)
    if isinstance(value, list):
        copied = copy.copy(value)  # with its attributes
        copied[:] = items
        return copied
    if not isinstance(value, tuple):
        return kind(items)
    try:
        return tuple.__new__(kind, items)  # its own constructor may take something else
    except TypeError:
        return kind(items)  # torch.return_types


def _rebuilt_mapping(value: Any, mapped: dict[Any, Any]) -> Any:
    """A mapping of the same class with the mapped values. `ModelOutput`s, for instance, have no `update`."""
    kind = type(value)
    try:
        copied = value.copy()
        if type(copied) is kind:
            for key, item in mapped.items():
                copied[key] = item
            return copied
    except (AttributeError, TypeError):
        pass
    return kind(mapped)


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """A copy of a dataclass, without running its `__init__`, which may compute."""
    copied = object.__new__(type(value))
    if hasattr(value, "__dict__"):
        copied.__dict__.update(value.__dict__)
    for field in dataclasses.fields(value):
        object.__setattr__(copied, field.name, changed.get(field.name, getattr(value, field.name)))
    return copied


# ------------------------------------------------------------------ what a module changes in its inputs


class _Copy(NamedTuple):
    original: Any
    copied: Any
    before: list[tuple[Any, Any]]  # the copy's contents when it was made
    originals: dict[int, Any]  # by the id of a replaced value in the copy


class Copies:
    """Containers of a module's inputs that were copied because tensors in them were replaced.

    A module may change a list, dict or dataclass that it is given, for example to collect losses or a cache in it. The
    caller has the original, so after forward each copy that was changed is followed by its original.

    >>> losses = [1.0]
    >>> copies, copied = Copies(), [2.0]  # in which something was replaced
    >>> copies.note(losses, copied)
    >>> copied.append(3.0)
    >>> copies.follow()
    >>> losses
    [1.0, 3.0]
    """

    def __init__(self) -> None:
        self._made: list[_Copy] = []

    def note(self, original: Any, copied: Any) -> None:
        """Remember a copy, whose contents are in the order of the original's."""
        before = _contents(copied)
        pairs = zip(before, _contents(original), strict=True)
        originals = {id(new): old for (_, new), (_, old) in pairs if new is not old}
        self._made.append(_Copy(original, copied, before, originals))

    def follow(self) -> None:
        """Change the originals as their copies have been changed since."""
        for each in reversed(self._made):
            now = _contents(each.copied)
            if len(now) != len(each.before) or any(
                key is not old_key or value is not old
                for (key, value), (old_key, old) in zip(now, each.before, strict=True)
            ):
                _fill(each.original, [(key, each.originals.get(id(value), value)) for key, value in now])


def _contents(container: Any) -> list[tuple[Any, Any]]:
    """Keys, or attributes' names, and values; the keys of sequences and sets are None."""
    if isinstance(container, Mapping):
        return list(container.items())
    if isinstance(container, list | deque | set):
        return [(None, value) for value in container]
    return list(getattr(container, "__dict__", {}).items())


def _fill(container: Any, contents: list[tuple[Any, Any]]) -> None:
    values = [value for _, value in contents]
    if isinstance(container, list):
        container[:] = values
    elif isinstance(container, deque | set):
        container.clear()
        container.update(values) if isinstance(container, set) else container.extend(values)
    elif isinstance(container, MutableMapping):
        kept = dict(contents)
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key, value in contents:
            if key not in container or container[key] is not value:
                container[key] = value
    elif not isinstance(container, Mapping):
        kept = dict(contents)
        for name in [name for name in container.__dict__ if name not in kept]:
            delattr(container, name)
        for name, value in contents:
            if container.__dict__.get(name, container) is not value:
                object.__setattr__(container, name, value)
