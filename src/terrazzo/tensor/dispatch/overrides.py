"""Users' sharding rules, by operator; see `terrazzo.tensor.experimental.register_sharding`.

Our own rules are for whole functions (`torch.softmax`). A user's rule is for an ATen operator (`aten._softmax`). So a
function that decomposes into an operator with a user's rule is decomposed before our own rule for it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket, TorchDispatchMode, without_subclass_functions
from terrazzo.tensor.dispatch.spec import Call, Spec
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import DTensor


@dataclass(frozen=True)
class Decomposed:
    """A user's function of DTensors that computes an operation from others."""

    function: Callable[..., Any]

    def __call__(self, func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        """As a route."""
        return self.function(*args, **kwargs)


Override: TypeAlias = Callable[[Call, Sequence[Any], Mapping[str, Any]], Spec | None]

OVERRIDES: dict[Any, Override | Decomposed] = {}
"""By operator or function: a rule, a function of the call and of its arguments as they are; or a decomposition."""


def leads_to_override(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` is computed by an operator that has a rule in `OVERRIDES`; found by a run on the meta device."""
    if isinstance(func, OpOverloadPacket):
        return any(getattr(func, name) in OVERRIDES for name in func.overloads())
    seen = _Operators()
    meta_args, meta_kwargs = map_tensors(list(args), on_meta), map_tensors(dict(kwargs), on_meta)
    try:
        with torch.no_grad(), seen:
            func(*meta_args, **meta_kwargs)
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


def on_meta(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same global shape and dtype, without data."""
    dtype = t._local.dtype if isinstance(t, DTensor) else t.dtype
    return torch.empty(tuple(t.shape), dtype=dtype, device="meta")


def run_composite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let C++ decompose `func`, calling back with its parts (`dispatch.aten`)."""
    with without_subclass_functions():
        return func(*args, **kwargs)
