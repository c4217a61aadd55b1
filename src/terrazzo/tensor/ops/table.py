"""The table of operations: for each canonical name, how the operation runs.

Every operation has exactly one entry, and every entry is of one kind:

    rule            a map from dims to factors (`dispatch.spec`), from which the planner makes a plan. Calls that the
                    rule does not cover use the decomposition of the same name, or else run as an operation without an
                    entry would.
    decomposition   a function of DTensors that computes the operation from operations that have rules
    handler         a function that does not compute on local tensors: it writes, draws random numbers, or returns
                    Python values
    body            the operation's own body, in Python or C++, run on DTensors: its parts are looked up one by one
    replicate       the operands are gathered and the caller's function runs on them

An operation without an entry is elementwise if PyTorch says so, and then has the rule of all elementwise operations.
Otherwise it runs its body if that is in Python, and is replicated if not.

An in-place operation has its own name, with the underscore, only if it is handled differently from the functional one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch

from terrazzo.tensor.dispatch.spec import Call, Operand, Spec
from terrazzo.tensor.ops.forms import names_of

How: TypeAlias = Literal["rule", "decomposition", "handler", "body", "replicate"]
Rule: TypeAlias = Callable[..., Spec | None]
Decomposition: TypeAlias = Callable[..., Any]
Handler: TypeAlias = Callable[[Any, Any, Any], Any]
"""(function, args, kwargs) -> result"""
_F = TypeVar("_F", bound=Callable[..., Any])


class Context(Protocol):
    """A context manager of terrazzo that changes how an operation is computed inside it."""

    def is_entered(self) -> bool:
        """Whether this thread is inside."""

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result inside the context, or NotImplemented for the usual way."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the table."""

    name: str
    how: How
    function: Callable[..., Any] | None = None
    """The rule, decomposition or handler."""
    otherwise: Decomposition | None = None
    """The decomposition for the calls that the rule does not cover."""
    takes_plain: Callable[[torch.Tensor], bool] | None = None
    """Which plain tensors after the first argument count as the same on every rank (indices, initial states)."""
    context: Context | None = None
    """A context that is asked first."""
    draws: bool = False
    """Whether it draws random numbers. Then ranks outside the mesh must draw, too, so they run its decomposition."""
    any_number: bool = False
    """Whether its plans do not depend on the values of its numbers."""


TABLE: dict[str, Operation] = {}


def _add(operation: Operation) -> None:
    """Add an entry. A rule and a decomposition of one name become one entry, in either order."""
    known = TABLE.get(operation.name)
    if known is not None:
        rule, apart = (known, operation) if known.how == "rule" else (operation, known)
        if rule.how != "rule" or rule.otherwise is not None or apart.how != "decomposition":
            raise AssertionError(f"{operation.name} is registered twice in the table of operations")
        operation = replace(rule, otherwise=apart.function)
    TABLE[operation.name] = operation


def rule(
    *names: str,
    otherwise: Decomposition | None = None,
    takes_plain: Callable[[torch.Tensor], bool] | None = None,
    context: Context | None = None,
    draws: bool = False,
    any_number: bool = False,
) -> Callable[[_F], _F]:
    """Register a rule: a function of the call and of the operation's arguments, with PyTorch's argument names.

    It covers the calls whose arguments are what its annotations say.
    """
    return _registering(
        names, "rule", otherwise=otherwise, takes_plain=takes_plain, context=context, draws=draws, any_number=any_number
    )


def decomposition(*names: str) -> Callable[[_F], _F]:
    """Register a function of DTensors that computes the operation from others.

    For a name that also has a rule, it runs the calls that the rule does not cover. It may return NotImplemented.
    """
    return _registering(names, "decomposition")


def handler(*names: str) -> Callable[[_F], _F]:
    """Register a function of the caller's function, arguments and keyword arguments, with DTensors in them."""
    return _registering(names, "handler")


def _registering(names: Sequence[str], how: How, **more: Any) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        for name in names:
            _add(Operation(name, how, function, **more))
        return function

    return register


def body(*names: str) -> None:
    """Register operations that PyTorch's C++ composes from others."""
    for name in names:
        _add(Operation(name, "body"))


_by_default: list[tuple[Callable[[str], bool], Rule]] = []


def elementwise(covers: Callable[[str], bool], rule: Rule) -> None:
    """Register the rule for all operations whose names `covers` accepts and that have no entry."""
    _by_default.append((covers, rule))


def operation(name: str, inplace: bool = False) -> Operation:
    """The entry for a canonical name, or a default one if there is none.

    >>> operation("mm").how, operation("exp").how, operation("histc").how
    ('rule', 'rule', 'replicate')
    """
    found = TABLE.get(name + "_") if inplace else None
    found = found or TABLE.get(name)
    if found is None:
        default = next((rule for covers, rule in _by_default if covers(name)), None)
        return Operation(name, "replicate" if default is None else "rule", default, any_number=default is not None)
    return found


def apply_rule(call: Call) -> Spec | None:
    """The rule's answer; None if there is no rule, or if the rule does not take these arguments."""
    found = operation(call.name)
    if found.how != "rule" or found.function is None:
        return None
    run = taking(found.function, call.func, call.args, call.kwargs, call)
    return None if run is None else run(call.args, call.kwargs)


def taking(
    function: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *first: Any
) -> Callable[[Sequence[Any], Mapping[str, Any]], Any] | None:
    """`function`, a rule or decomposition, as a function of the arguments of such calls of `func`, after `first`.

    None: it does not take them, or other kinds of them. Functions in Python may order their arguments differently from
    the ATen operators of the same name, so theirs are passed by name.
    """
    signature = _signature(function)
    names = names_of(func, args)
    if names and names != tuple(signature.parameters)[len(first) : len(first) + len(names)]:
        try:
            bound = signature.bind(*first, **dict(zip(names, args, strict=True)), **kwargs)
        except TypeError:  # the rule has other argument names, so it also has the caller's order
            pass
        else:
            if not _are_as_annotated(bound):
                return None
            return lambda args, kwargs: function(*first, **dict(zip(names, args, strict=True)), **kwargs)
    try:
        bound = signature.bind(*first, *args, **kwargs)
    except TypeError:
        return None
    if not _are_as_annotated(bound):
        return None
    return lambda args, kwargs: function(*first, *args, **kwargs)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _are_as_annotated(bound: inspect.BoundArguments) -> bool:
    parameters = bound.signature.parameters
    return all(_is(parameters[name].annotation, value) for name, value in bound.arguments.items())


_KINDS = {"Operand": Operand, "int": int, "bool": bool, "None": type(None)}


def _is(annotation: str, value: Any) -> bool:
    """Whether an argument is what an annotation says; other annotations than these are not looked at."""
    if annotation == "Static":
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return type(value) is not Operand and all(_is("Static", part) for part in parts)
    if annotation == "Ints":
        return _is("int | None | Sequence[int]", value)
    if " | " in annotation:
        return any(_is(each, value) for each in annotation.split(" | "))
    if annotation.startswith("Sequence["):
        return isinstance(value, (list, tuple)) and all(_is(annotation[9:-1], each) for each in value)
    kind = _KINDS.get(annotation)
    return kind is None or type(value) is kind
