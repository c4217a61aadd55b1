"""The forms of a call: keyword arguments are moved to their positions once, so that all other code sees one form.

`torch.mean(input=x, dim=0)`, `torch.mean(x, dim=0)` and `x.mean(axis=0)` become `mean(x, 0)`. Names and positions come
from the function itself if it is written in Python, else from the schemas of the ATen operators of its name. Arguments
that can only be given by keyword, and those behind an argument that is left out, stay keyword arguments under PyTorch's
own names.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket, schema_of
from terrazzo.tensor.dispatch.names import canonical_name

_OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Numpy's names for arguments, which PyTorch's C++ functions accept, and PyTorch's own."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The names of the arguments that may be given by position, in order, and of those that are keyword-only."""

    positional: tuple[str, ...]
    named: frozenset[str]
    renames: bool
    """Whether numpy's names for arguments are accepted, as functions in C++ do."""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """For functions in Python: the defaults that may fill a gap between given arguments."""
    integers: frozenset[str] = frozenset()
    """The arguments that are integers or lists of them."""
    tensors: frozenset[str] = frozenset()
    """The arguments that may be tensors, or numbers of any type."""
    of_tensors: bool = True
    """Whether it takes a tensor first; other overloads of operators are TorchScript's, for lists."""

    def name(self, given: str) -> str:
        """The signature's own name for an argument."""
        if given in self.named or given in self.positional:
            return given
        return _OTHER_NAMES.get(given, given) if self.renames else given


@dataclass(frozen=True, slots=True)
class Form:
    """How the arguments of one form of a call are moved to their positions."""

    order: tuple[tuple[str, Any], ...]
    """What follows the positional arguments: the value of a keyword or, where it is left out, its default."""
    keep: tuple[tuple[str, str], ...]
    """The keyword arguments that stay: the given name, and the signature's own name."""

    @property
    def changes(self) -> bool:
        """Whether this is another form than the caller's."""
        return bool(self.order) or any(given != own for given, own in self.keep)

    def apply(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in their positions.

        >>> form = form_of(torch.sum, (), {"dim": 0, "input": None})
        >>> form.apply((), {"dim": 0, "input": "x"})
        (['x', 0], {})
        """
        placed = [*args, *[kwargs[v] if kind == "given" else v for kind, v in self.order]]
        return placed, {own: kwargs[given] for given, own in self.keep}


@functools.lru_cache(maxsize=4096)
def signatures(func: Any) -> tuple[Signature, ...]:
    """The signatures of a function: one if it is in Python, one per overload if it is in C++.

    >>> signatures(torch.nn.functional.relu)[0].positional
    ('input', 'inplace')
    >>> [s.positional for s in signatures(torch.Tensor.argmax)]
    [('input', 'dim', 'keepdim')]
    """
    if isinstance(func, types.FunctionType):
        return _of_python(func)
    if isinstance(func, OpOverload):
        return (_of_schema(schema_of(func), "self"),)
    packet: Any = func
    if not isinstance(func, OpOverloadPacket):
        name, inplace = canonical_name(func)
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None) or getattr(
            torch.ops.aten, name + "_" * inplace, None
        )
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    is_of_lists = packet.__name__.startswith("_foreach_")
    own = "self" if is_of_lists or isinstance(func, OpOverloadPacket) else "input"
    # `out=` has been handled before (`dispatch.inplace`); TorchScript's overloads are not callable from Python.
    overloads = [o for o in packet.overloads() if o != "out" and not o.endswith("_out") and not o.startswith("prim_")]
    found = [_of_schema(schema_of(getattr(packet, o)), own) for o in overloads]
    return tuple(dict.fromkeys(found))


def _of_python(func: Callable[..., Any]) -> tuple[Signature, ...]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # a wrapper of a function in C++
        return ()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ()
    positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    named = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    # torch's annotations of one or several integers, BroadcastingList, have the value None.
    said = {p.name: "Tensor" if p.annotation is p.empty else inspect.formatannotation(p.annotation) for p in parameters}
    tensors = frozenset(name for name, kind in said.items() if "Tensor" in kind or "float" in kind)
    integers = frozenset(name for name, kind in said.items() if "int" in kind or "None" in kind) - tensors
    return (Signature(positional, named, False, defaults, integers, tensors),)


def _of_schema(schema: Any, own: str) -> Signature:
    """`own` is what the function calls the argument that the schema calls self."""
    names = [(own if a.name == "self" else a.name, a.kwarg_only) for a in schema.arguments]
    positional = tuple(name for name, only in names if not only)
    kinds = [(name, str(a.type)) for (name, _), a in zip(names, schema.arguments, strict=True)]
    integers = frozenset(name for name, kind in kinds if kind in _INTEGERS)
    tensors = frozenset(name for name, kind in kinds if any(word in kind for word in ("Tensor", "number", "float")))
    named = frozenset(name for name, only in names if only)
    of_tensors = bool(kinds) and "Tensor" in kinds[0][1]
    return Signature(positional, named, own != "self", {}, integers, tensors, of_tensors)


_INTEGERS = {"int", "Optional[int]", "List[int]", "Optional[List[int]]"}


def form_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    """How to move the arguments of this call to their positions; None if they are there, or if no signature fits.

    >>> form_of(torch.sum, ("x",), {"dtype": torch.float32}) is None
    True
    """
    best: tuple[tuple[int, int], Form] | None = None
    places: dict[str, int] = {}
    for signature in signatures(func):
        form = _fit(signature, len(args), kwargs)
        if form is None:
            continue
        unplaced = sum(own not in signature.named for _, own in form.keep)
        if not form.order and not unplaced and all(given == own for given, own in form.keep):
            return None
        for at, (kind, given) in enumerate(form.order):
            if kind == "given" and places.setdefault(given, at) != at:
                return None  # overloads disagree, and only C++ knows from the types which one is meant
        # An overload in which the arguments stay keyword-only is preferred to an older one that took them by position.
        rank = (unplaced, len(form.order))
        if best is None or rank < best[0]:
            best = rank, form
    return None if best is None or not best[1].changes else best[1]


def _fit(signature: Signature, count: int, kwargs: Mapping[str, Any]) -> Form | None:
    """The form of a call with `count` positional arguments under a signature; None if the call does not fit it."""
    by_name = {signature.name(given): given for given in kwargs}
    if len(by_name) != len(kwargs):
        return None
    only = {own for own in by_name if own in signature.named}
    placed = [own for own in by_name if own not in only]
    if not placed:
        return Form((), tuple((given, own) for own, given in by_name.items()))
    rest = signature.positional[count:]
    if not set(placed) <= set(rest):
        return None
    order: list[tuple[str, Any]] = []
    last = max(rest.index(own) for own in placed)
    for own in rest[: last + 1]:
        if own in by_name:
            order.append(("given", by_name[own]))
        elif own in signature.defaults:
            order.append(("default", signature.defaults[own]))
        else:
            break
    taken = {given for kind, given in order if kind == "given"}
    while order and order[-1][0] == "default":
        order.pop()
    return Form(tuple(order), tuple((given, own) for own, given in by_name.items() if given not in taken))


def names_of(func: Any, args: Sequence[Any]) -> tuple[str, ...] | None:
    """The names of the positional arguments of a function in Python; None for others, or for `*args`.

    >>> names_of(torch.nn.functional.mse_loss, ("x", "y"))
    ('input', 'target')
    """
    known = signatures(func) if isinstance(func, types.FunctionType) else ()
    return known[0].positional[: len(args)] if known and len(args) <= len(known[0].positional) else None


def place_of(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The position of the argument with this name in a call; None if it is not given by position.

    >>> place_of("reduction", torch.nn.functional.mse_loss, ("x", "y", None, None, "sum"), {})
    4
    """
    for signature in signatures(func):
        if name in signature.positional[: len(args)] and _fit(signature, len(args), kwargs) is not None:
            return signature.positional.index(name)
    return None


def with_integers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments with Python's integers in place of what stands for them: 0-d tensors, numpy's, members of an enum.

    None if there are none. PyTorch's C++ reads their values (`x.sum(t)`, `x.view(t, -1)`), on which plans depend.
    """
    value_of_any = canonical_name(func)[0] in _VALUE_OF_ANY
    given = [i for i, a in enumerate(args) if i and _holds_integer(a)]
    named = [k for k, a in kwargs.items() if _holds_integer(a)]
    if not given and not named:
        return None
    # What follows the last positional argument belongs to it, as in x.view(2, 3).
    fitting = [
        s
        for s in signatures(func) or signatures(_chosen_by_flag(func))
        if s.of_tensors
        and (len(args) <= len(s.positional) or s.positional[-1] in s.integers)
        and _fit(s, len(args), kwargs) is not None
    ]

    def means_number(names: Sequence[str]) -> bool:
        return value_of_any or (
            any(n in s.integers for s, n in zip(fitting, names, strict=True))
            and not any(n in s.tensors for s, n in zip(fitting, names, strict=True))
        )

    given = [i for i in given if means_number([s.positional[min(i, len(s.positional) - 1)] for s in fitting])]
    named = [k for k in named if means_number([s.name(k) for s in fitting])]
    if not given and not named:
        return None
    new_args, new_kwargs = list(args), dict(kwargs)
    for i in given:
        new_args[i] = _numbers(args[i])
    for k in named:
        new_kwargs[k] = _numbers(kwargs[k])
    return new_args, new_kwargs


_VALUE_OF_ANY = {"narrow", "repeat_interleave", "split", "tensor_split", "unflatten"}
"""Functions that read the value of every 0-d tensor after the first, though not all signatures say so."""


def _chosen_by_flag(func: Any) -> Any:
    """One of the two functions that a function calls by the value of a flag (`max_pool2d` by `return_indices`)."""
    return inspect.getclosurevars(func).nonlocals.get("if_false") if isinstance(func, types.FunctionType) else None


def _holds_integer(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_holds_integer, value))
    return _may_be_integer(value)


def _numbers(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_numbers, value))
    return operator.index(value) if _may_be_integer(value) else value


def _may_be_integer(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return type(value) not in (int, bool) and isinstance(value, Integral)
    return value.dim() == 0 and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
