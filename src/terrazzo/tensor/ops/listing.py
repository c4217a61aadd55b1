"""The table of operations as rows to print: `terrazzo ops`."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from terrazzo._torch.dispatching import schema_of
from terrazzo.tensor.dispatch.names import VIEWS_IN_PYTHON, Alias, alias_of, canonical_name
from terrazzo.tensor.ops.table import TABLE, How, Operation, operation


class Row(msgspec.Struct, frozen=True):
    """One operation: how it runs, how its result's memory relates to its argument, and where that is written."""

    name: str
    how: How
    alias: Alias
    otherwise: How | None
    """How calls run that the rule, decomposition or handler does not cover."""
    where: str
    """File and line of the rule, decomposition or handler."""
    otherwise_where: str
    schema: tuple[str, ...]
    """The signatures of the ATen operators of this name."""


def rows(pattern: str = "") -> list[Row]:
    """The operations whose names contain `pattern`, by name; also as it is written in programs and in profiles.

    >>> [row.how for row in rows("softmax") if row.name == "softmax"]
    ['rule']
    >>> rows("torch.ops.aten.roll.default") == rows("aten::roll") == rows("torch.roll")
    True
    >>> [row.name for row in rows("torch.multiply")], [row.how for row in rows("native_layer_norm_backward")]
    (['mul'], ['replicate'])
    """
    name = _HOME.sub("", pattern)
    if name != pattern:
        name = name.partition(".")[0]
    found = {known for known in _names() if name in known}
    if name not in found and name.isidentifier() and hasattr(torch.ops.aten, name):  # another name, or ATen's alone
        known, inplace = canonical_name(getattr(torch.ops.aten, name))
        found.add(known + "_" * inplace)
    return [_row(known) for known in sorted(found)]


_HOME = re.compile(r"^(torch\.)?(ops\.)?(aten(\.|::)|nn\.functional\.|F\.|Tensor\.)?")


def _names() -> set[str]:
    """The names in the table, and those of all overridable functions."""
    found = set(TABLE)
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name, _ = canonical_name(function)
            if not name.startswith(("get_", "set_", "_", "__")):
                found.add(name)
    return found


def _row(name: str) -> Row:
    inplace = name.endswith("_") and not name.endswith("__")
    entry = operation(name.removesuffix("_"), inplace) if name not in TABLE else TABLE[name]
    how, otherwise = entry.how, _otherwise(entry)
    if how == "replicate" and _is_python(name):
        how, otherwise = "body", None
    packet: Any = None if name in VIEWS_IN_PYTHON else getattr(torch.ops.aten, name, None)
    schema = [str(schema_of(getattr(packet, o))) for o in packet.overloads()] if hasattr(packet, "overloads") else []
    return Row(
        name,
        how,
        alias_of(name.removesuffix("_") if inplace else name, inplace),
        otherwise,
        _where(entry.function),
        _where(entry.otherwise),
        tuple(schema),
    )


def _otherwise(entry: Operation) -> How | None:
    if entry.how == "replicate" or entry.how == "body":
        return None
    if entry.otherwise is not None:
        return "decomposition"
    return "body" if _is_python(entry.name) else "replicate"


def _is_python(name: str) -> bool:
    homes = (torch.nn.functional, torch.functional, torch, torch.Tensor)
    return any(isinstance(getattr(home, name, None), types.FunctionType) for home in homes)


def _where(function: Callable[..., Any] | None) -> str:
    if function is None:
        return ""
    file = Path(inspect.getfile(function)).resolve()
    package = Path(__file__).resolve().parents[2]
    return f"{file.relative_to(package.parent)}:{inspect.getsourcelines(function)[1]}"
