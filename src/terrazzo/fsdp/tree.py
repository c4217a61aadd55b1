"""Tensors in modules' inputs and outputs: nested lists, tuples, named tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to each tensor in it; the same object if that changes nothing.

    >>> import torch
    >>> map_tensors({"x": [torch.ones(2)], "n": 3}, lambda t: t + 1)
    {'x': [tensor([2., 2.])], 'n': 3}
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        items = [map_tensors(item, function) for item in value]
        return value if _same(items, value) else kind(items)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        items = [map_tensors(item, function) for item in value]
        return value if _same(items, value) else kind._make(items)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        if _same(mapped.values(), value.values()):
            return value
        return mapped if kind is dict else _rebuilt_mapping(value, mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        mapped = {name: map_tensors(item, function) for name, item in fields.items()}
        changed = {name: item for name, item in mapped.items() if item is not fields[name]}
        return _with_fields(value, changed) if changed else value
    return value


def has_tensor(value: Any) -> bool:
    """Whether `map_tensors` would find a tensor."""
    found = False

    def note(tensor: Tensor) -> Tensor:
        nonlocal found
        found = True
        return tensor

    map_tensors(value, note)
    return found


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


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
