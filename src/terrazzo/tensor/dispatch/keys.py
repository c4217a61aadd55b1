"""What a cached route is found by.

A key is a tuple of the function, the layouts of the DTensors and the static arguments. Two calls may only share a key
if every decision about them is the same, so whatever Python takes for equal but PyTorch does not is tagged: True and 1,
1 and 1.0, 0.0 and -0.0, a slice and a Size, several arguments and a tuple of them. This is the part of keying that
needs no DTensor; `dtensor` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from typing import Any

import torch

from terrazzo.comm.mesh import when_groups_end

Route = Callable[[Any, Sequence[Any], list[Any], dict[str, Any], dict[str, Any]], Any]
"""(function, args, args with locals, kwargs with locals, kwargs) -> result"""

routes: dict[tuple[Any, ...], Route] = {}
"""Cached routes by key."""

when_groups_end(routes.clear)  # keys hold layouts, and these hold meshes

ROUTE_LIMIT = 16384
"""Cached routes at most; beyond it the cache starts anew, so that ever-changing shapes cannot grow it without bound."""

list_handlers: dict[Any, Callable[[Any, Sequence[Any], Any], Any]] = {}
"""Functions of lists of tensors (`torch._foreach_*`), which are not worth a key: handler by function."""

any_float: set[Any] = set()
"""Functions whose routes are the same for all values of a float argument: elementwise ones, whose numbers often change.

Others are keyed by value: a scale factor decides on a shape, and whether what is filled in is 0 on what terms are.
"""

PLAIN_KEYS = frozenset(
    [int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis)]
)
"""Types of static arguments that are keyed by value as they are; no value of one equals a value of another."""


class Tag:
    """Stands in keys for what kind of thing follows, or for a value that equals others."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


TRUE, FALSE, SLICE, TUPLE, LIST, KEYWORD, NUMBER_TENSOR = map(
    Tag, ("TRUE", "FALSE", "SLICE", "TUPLE", "LIST", "KEYWORD", "NUMBER_TENSOR")
)


class Unkeyable(TypeError):
    """An argument that no route can be cached for (unhashable, or a plain tensor)."""


def remember(key: tuple[Any, ...] | None, route: Route) -> None:
    """Cache a route, within bounds."""
    if key is None:
        return
    if len(routes) >= ROUTE_LIMIT:
        routes.clear()
    routes[key] = route


def float_key(value: float) -> tuple[Any, ...]:
    """What identifies a float by value: the two zeros are different, as 1 / x and signs see them."""
    return (float, value) if value else (float, copysign(1.0, value), "zero")


def append_basic_index(index: tuple[Any, ...], key: list[Any]) -> bool:
    """Key a tuple of slices and plain values; False when there is something else in it, the key being useless then.

    Bounds that are tensors end up in the key too: no route is ever kept for those, so such a key finds none.
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
