"""Operators of ATen: users' rules for them (`terrazzo.tensor.experimental.register_sharding`), and calls from C++.

Our own rules are for whole functions (`torch.softmax`). A user's rule is for an ATen operator (`aten._softmax`). So a
function that decomposes into an operator with a user's rule is decomposed before our own rule for it is used.

Inside composites that PyTorch's C++ decomposes, DTensors come back here as single operations. A DTensor's autograd
graph is that of its local tensor. C++ autograd has run before this point, but has recorded nothing for the DTensor. The
thread state from before is restored, so that operations on the local tensors are recorded as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from terrazzo._torch.autograd import innermost_transform
from terrazzo._torch.dispatching import (
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    is_composite,
    thread_state_before_dispatch,
    unseen,
    without_autocast,
    without_subclass_functions,
)
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.spec import Call, Spec
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import DTensor, local_of
from terrazzo.tensor.links import links
from terrazzo.tensor.ops.table import TABLE


@dataclass(frozen=True)
class Decomposed:
    """A user's function of DTensors that computes an operation from others."""

    function: Callable[..., Any]

    def __call__(self, func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        """Call the function; this makes it a route."""
        return self.function(*args, **kwargs)


Override: TypeAlias = Callable[[Call, Sequence[Any], Mapping[str, Any]], Spec | None]

OVERRIDES: dict[Any, Override | Decomposed] = {}
"""By operator or function: a rule, a function of the call and of its arguments as they are; or a decomposition."""


def leads_to_override(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` is computed by an operator that has a rule in `OVERRIDES`; found by a run on the meta device."""
    if isinstance(func, OpOverloadPacket):
        return any(getattr(func, name) in OVERRIDES for name in func.overloads())
    seen = _Operators()
    try:
        run_on_meta(func, args, kwargs, seen)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False  # it needs data; its parts come here again, operator by operator
    return not OVERRIDES.keys().isdisjoint(seen.operators)


def take_apart(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    """A route: let `func` decompose into operators."""
    if isinstance(func, OpOverload):
        return func.decompose(*args, **kwargs)
    return run_composite(func, args, kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def run_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any = None) -> Any:
    """What `func` returns, under a mode, for tensors of the same global shapes and dtypes, without data."""

    def on_meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(t.shape), dtype=local_of(t).dtype, device="meta")

    with unseen(), torch.no_grad(), mode or nullcontext():
        return func(*map_tensors(list(args), on_meta), **map_tensors(dict(kwargs), on_meta))


def run_composite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let C++ decompose `func`, calling back with its parts (`dispatch_aten`)."""
    with without_subclass_functions():
        return func(*args, **kwargs)


def dispatch_aten(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one aten operation on DTensors, called from C++."""
    name, _ = canonical_name(op)
    if (
        is_composite(op)
        and (name not in TABLE or TABLE[name].how == "body")
        and op not in OVERRIDES
        and op is not torch.ops.aten.detach.default
    ):
        return op.decompose(*args, **kwargs)
    if innermost_transform() is not None:
        return DTensor.__torch_function__(op, (DTensor,), args, dict(kwargs))
    # Autocast has cast the composite's inputs already; the parts must not be cast again.
    with thread_state_before_dispatch(), without_autocast():
        return DTensor.__torch_function__(op, (DTensor,), args, dict(kwargs))


links.aten = dispatch_aten
