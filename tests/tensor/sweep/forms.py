"""The forms in which an entry can be called: as the database does, by keywords, as a method, with `out=`, in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

FORMS = ("plain", "keyword", "method", "operator", "out", "inplace", "inplace operator")


def has_form(op: Any, form: str) -> bool:
    """Whether the entry might have the form; whether a sample fits it is found out by calling it."""
    if form == "keyword":
        return getattr(op.op, "__name__", "") != "<lambda>"
    if form == "out":
        return op.supports_out
    return form == "plain" or _function(op, form) is not None


def _function(op: Any, form: str) -> Any:
    if form == "method":
        method = op.get_method()
        return None if method is op.op else method
    if form == "inplace":
        return op.get_inplace()
    if form == "operator":
        return op.operator_variant
    if form == "inplace operator":
        return op.inplace_operator_variant
    return op.op


def calls(op: Any, form: str, args: Sequence[Any]) -> list[Callable[..., Any]]:
    """Functions of (input, *args, **kwargs) that call the entry in this form; the first that does not raise is it."""
    function = _function(op, form)
    if form != "keyword":
        return [function]
    return [_by_name(function, names) for names in _parameter_names(op, function, len(args) + 1)]


def _by_name(function: Any, names: Sequence[str | None]) -> Callable[..., Any]:
    """`names` may begin with None for what can only be given by position: a method's self."""
    positional = sum(name is None for name in names)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:positional], **dict(zip(names[positional:], args[positional:], strict=True)), **kwargs)

    return call


def _parameter_names(op: Any, function: Any, count: int) -> list[list[str | None]]:
    """What the first `count` parameters may be called, likely ones first."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return _schema_names(op, function, count)
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [list(named[:count])] if len(named) >= count else []


def _schema_names(op: Any, function: Any, count: int) -> list[list[str | None]]:
    packet = getattr(torch.ops.aten, getattr(function, "__name__", op.name.split(".")[-1]), None)
    if packet is None:
        return []
    found: list[list[str | None]] = []
    for overload in packet.overloads():
        arguments = [a.name for a in getattr(packet, overload)._schema.arguments if a.name != "out"]
        if len(arguments) < count:
            continue
        rest = list(arguments[1:count])
        for first in ("input", arguments[0], None):
            names: list[str | None] = [first, *rest]
            if names not in found and (first is not None or rest):
                found.append(names)
    return sorted(found, key=lambda names: names[0] is None)


def is_in_place(form: str) -> bool:
    return form.startswith("inplace")


def outs_like(result: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What to give as `out=`: for each tensor of a result another one, or None if the result is something else."""
    if isinstance(result, torch.Tensor):
        return make(result)
    if isinstance(result, (list, tuple)) and result and all(isinstance(r, torch.Tensor) for r in result):
        return tuple(make(r) for r in result)
    return None


def same_objects(result: Any, outs: Any) -> bool:
    """Whether what was returned is what was given as `out=`."""
    if isinstance(outs, tuple):
        return len(result) == len(outs) and all(map(operator.is_, result, outs))
    return result is outs
