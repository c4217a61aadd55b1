"""Whether a result has new memory, is a view of an argument, or is the argument itself when nothing changes.

This is read from the operators' schemas. Operations of the last kind (`contiguous`, `to`, `positive`) return the very
object that they were given where they have nothing to do, so that writes to the result reach the argument.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from terrazzo._torch.dispatching import schema_of

Alias = Literal["new", "view", "same", "written"]

_SAME = frozenset(
    [
        *("to", "contiguous", "positive", "real", "conj", "resolve_conj", "resolve_neg", "type_as", "cpu", "cuda"),
        "conj_physical",
        *("half", "float", "double", "bfloat16", "long", "int", "short", "char", "byte", "bool", "cfloat", "cdouble"),
        *("chalf", "type", "flatten", "pin_memory", "_autocast_to_full_precision", "_autocast_to_reduced_precision"),
    ]
)


VIEWS_IN_PYTHON = frozenset({"__getitem__", "H"})
"""Views that are not ATen operators; an operator of the same name is something else."""


@functools.lru_cache(maxsize=4096)
def alias_of(name: str, inplace: bool = False) -> Alias:
    """The alias class of an operation by canonical name.

    >>> alias_of("add"), alias_of("transpose"), alias_of("contiguous"), alias_of("add", inplace=True)
    ('new', 'view', 'same', 'written')
    """
    if inplace:
        return "written"
    if name in _SAME:
        return "same"
    if name in VIEWS_IN_PYTHON:
        return "view"
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return "new"
    for overload in packet.overloads():
        schema = schema_of(getattr(packet, overload))
        if schema.returns and schema.arguments:
            info = schema.returns[0].alias_info
            if info is not None and not info.is_write:
                return "view"
    return "new"
