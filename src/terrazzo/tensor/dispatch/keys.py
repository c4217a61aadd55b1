"""Keys of cached routes.

A key is a tuple of the function, the layouts of the DTensors and the static arguments. Two calls may share a key only
if every decision about them is the same. So values that are equal in Python but not for PyTorch are tagged: True and 1,
1 and 1.0, 0.0 and -0.0, a slice and a Size, several arguments and a tuple of them. This module is the part that needs
no DTensor; the rest is in `dtensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from typing import Any

import torch

from terrazzo.comm.mesh import when_groups_end
from terrazzo.layout import Layout

Route = Callable[[Any, Sequence[Any], list[Any], dict[str, Any], dict[str, Any]], Any]
"""(function, args, args with locals, kwargs with locals, kwargs) -> result"""

routes: dict[tuple[Any, ...], Route] = {}
"""Cached routes by key: those that were made or used since there were `ROUTE_LIMIT` of them."""

_earlier: dict[tuple[Any, ...], Route] = {}
"""Routes that were cached before. Those that are used return to `routes`; the others are forgotten later."""

ROUTE_LIMIT = 32768
"""The most routes in `routes`. Two such lots are kept, so that what is used least recently is forgotten."""

list_handlers: dict[Any, Callable[[Any, Sequence[Any], Any], Any]] = {}
"""Handlers of functions that take lists of tensors (`torch._foreach_*`); making keys of the lists would be too slow."""

any_number: set[Any] = set()
"""Functions whose routes do not depend on the value of a number, as numbers often change: elementwise ones, and those
that no rule plans.

For others the value may matter: a scale factor decides a shape.
"""

PLAIN_KEYS = frozenset(
    [int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis)]
)
"""Types of static arguments that are their own key: a value of one type never equals a value of another type."""


class Tag:
    """In a key, marks the kind of thing that follows, or replaces a value that is equal to another one."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


TRUE, FALSE, SLICE, TUPLE, LIST, KEYWORD, NUMBER_TENSOR = map(
    Tag, ("TRUE", "FALSE", "SLICE", "TUPLE", "LIST", "KEYWORD", "NUMBER_TENSOR")
)


class Unkeyable(TypeError):
    """An argument for which no route can be cached (unhashable, or a plain tensor)."""


def remember(key: tuple[Any, ...] | None, route: Route) -> None:
    """Cache a route, unless its key holds an object that may change; the cache has a maximum size."""
    if key is not None and _lasts(key[1:]):
        _keep(key, route)


def recall(key: tuple[Any, ...] | None) -> Route | None:
    """A route that is not in `routes`, if it has not been forgotten yet."""
    route = None if key is None else _earlier.pop(key, None)
    if key is not None and route is not None:
        _keep(key, route)
    return route


def forget() -> None:
    """Forget all routes."""
    routes.clear()
    _earlier.clear()


when_groups_end(forget)  # keys hold layouts, which hold meshes


def _keep(key: tuple[Any, ...], route: Route) -> None:
    if len(routes) >= ROUTE_LIMIT:
        _earlier.clear()
        _earlier.update(routes)
        routes.clear()
    routes[key] = route


def _lasts(item: Any) -> bool:
    """Whether two equal items of keys are, and stay, the same for every decision.

    Objects without a value of their own are compared by identity, and so are tensors: they may be changed.
    """
    if isinstance(item, tuple):
        return all(map(_lasts, item))
    if isinstance(item, torch.Tensor):
        return False
    kind: Any = type(item)
    return kind.__hash__ is not object.__hash__ or kind in PLAIN_KEYS or isinstance(item, (Layout, Tag, type))


def float_key(value: float) -> tuple[Any, ...]:
    """What identifies a float where its value may matter; 0.0 and -0.0 differ, because 1 / x and signs do."""
    return (float, value) if value else (float, copysign(1.0, value), "zero")


def append_basic_index(index: tuple[Any, ...], key: list[Any]) -> bool:
    """Append a tuple of slices and plain values to a key; False if it has other items, which makes the key useless.

    A bound that is a tensor is appended, too, which is harmless: `remember` caches no route under such a key.
    """
    for i in index:
        kind = type(i)
        if kind is slice:
            key.append((SLICE, i.start, i.stop, i.step))
        elif kind in PLAIN_KEYS:
            key.append(i)
        else:
            return False
    return True
