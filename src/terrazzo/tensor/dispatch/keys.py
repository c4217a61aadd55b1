"""What a cached plan is found by.

A key is a tuple of the function, the layouts of the DTensors and the static arguments: layouts by identity, floats by
type where the value does not matter, slices by their bounds. This is the part of keying that needs no DTensor;
`dtensor` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from terrazzo.comm.mesh import when_groups_end

Plan = Callable[[Any, Sequence[Any], list[Any], dict[str, Any], dict[str, Any]], Any]

plans: dict[tuple[Any, ...], Plan] = {}
"""Cached plans by key; `dispatch` fills it and keeps it bounded."""

when_groups_end(plans.clear)  # keys hold layouts, and these hold meshes

list_handlers: dict[Any, Callable[[Any, Sequence[Any], Any], Any]] = {}
"""Functions of lists of tensors (`torch._foreach_*`), which are not worth a key: handler by function."""

any_float: set[Any] = set()
"""Functions whose plan is the same for all values of a float argument: elementwise ones, whose numbers often change.

Others are keyed by value: a scale factor decides on a shape, and whether what is filled in is 0 on what terms are.
"""

PLAIN_KEYS = frozenset(
    [int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), torch.Size]
)
"""Types of static arguments that are keyed by value as they are."""

TRUE, FALSE = object(), object()
"""Keys of the two bools: as themselves they would equal 1 and 0."""


class Unkeyable(TypeError):
    """An argument that no plan can be cached for (unhashable, or a plain tensor)."""


def append_basic_index(index: tuple[Any, ...], key: list[Any]) -> bool:
    """Key a tuple of slices and plain values; False when there is something else in it, the key being useless then.

    Bounds that are tensors end up in the key too: no plan is ever kept for those, so such a key finds none.
    """
    for i in index:
        kind = type(i)
        if kind is slice:
            key.append((i.start, i.stop, i.step))
        elif kind in PLAIN_KEYS:
            key.append(i)
        else:
            return False
    return True
