"""Where rules are kept: by canonical name, one rule for a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from terrazzo.tensor.dispatch.spec import Call, Spec

Rule: TypeAlias = Callable[..., Spec | None]
_F = TypeVar("_F", bound=Rule)

_rules: dict[str, tuple[Rule, inspect.Signature]] = {}

COMPOSITES: set[str] = set()
"""C++ composites without a rule of their own that decompose into operations that have one."""

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}
"""Operations as Python functions of DTensors; a decomposition may return NotImplemented."""


def rule(*names: str) -> Callable[[_F], _F]:
    """Register a rule: a function of the call and of the operation's own arguments, named as PyTorch names them."""

    def register(function: _F) -> _F:
        signature = inspect.signature(function)
        for name in names:
            if name in _rules:
                raise AssertionError(f"two rules for {name}")
            _rules[name] = (function, signature)
        return function

    return register


def has_rule(name: str) -> bool:
    return name in _rules


@dataclass(slots=True)
class _Elementwise:
    """The rule for all elementwise operations that have none of their own, and which these are."""

    covers: Callable[[str], bool]
    rule: Callable[[Call], Spec | None]


_elementwise = _Elementwise(lambda name: False, lambda call: None)


def elementwise(covers: Callable[[str], bool], rule: Callable[[Call], Spec | None]) -> None:
    """Register the rule for all operations whose names `covers` accepts and that have no rule of their own."""
    _elementwise.covers, _elementwise.rule = covers, rule


def works_on_any_float(name: str) -> bool:
    """Whether what `apply_rule` says is the same for all values of float arguments: elementwise ones only look at
    shapes."""
    return not has_rule(name) and _elementwise.covers(name)


def apply_rule(call: Call) -> Spec | None:
    """The rule's answer; None when there is no rule, or when the call's arguments are not those that it covers."""
    found = _rules.get(call.name)
    if found is None:
        return _elementwise.rule(call) if _elementwise.covers(call.name) else None
    function, signature = found
    try:
        bound = signature.bind(call, *call.args, **call.kwargs)
    except TypeError:
        return None
    return function(*bound.args, **bound.kwargs)


def decomposition(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of DTensors that computes the operation from operations with rules."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            DECOMPOSITIONS[name] = function
        return function

    return register
