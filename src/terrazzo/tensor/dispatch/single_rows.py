"""Strides of results on a rank that holds one row along some dim, or none.

Whether a tensor is contiguous is read from the local tensor's strides (`tensor.strides`), and must be the same on every
rank. But C++ gives a new tensor any stride along a dim of one row, and any strides if it has no elements. So on such a
rank the function also runs on meta tensors of the global shapes, once for each combination of strides, and the results
get strides that show their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo._torch.dispatching import unseen_by_modes
from terrazzo._torch.storages import memory_of
from terrazzo.layout import Layout
from terrazzo.tensor.dispatch.planner import OperandPlan
from terrazzo.tensor.dispatch.spec import LocalFunction
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, put_at
from terrazzo.tensor.strides import global_stride, is_contiguous, is_thin, shows_order

Strides = tuple[tuple[int, ...], ...]

_STRIDES_OF_ADD = frozenset(
    [
        *("copysign", "div", "floor_divide", "heaviside", "ldexp", "logaddexp", "logical_and", "logical_or"),
        *("logical_xor", "special_xlog1py", "xlogy"),
    ]
)
"""Elementwise functions that run in Python on meta tensors, and give them other strides than C++ gives real ones."""


def strides_say_little(layout: Layout) -> bool:
    """Whether this rank has at most one row along a dim of several."""
    return len(layout.local_shape) == layout.ndim and is_thin(layout.local_shape, layout.shape)


def showing_order(
    name: str, local: LocalFunction | None, operands: Sequence[OperandPlan], outs: Sequence[Layout]
) -> LocalFunction:
    """`local` (the caller's function if None) whose new results have strides that show their memory order."""
    known: dict[Strides, Strides | None] = {}

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        given = [get_at(loc, kw, o.path) for o in operands]
        result = func(*loc, **kw) if local is None else local(func, loc, kw)
        key = tuple(t.stride() for t in given)
        if key not in known:
            # Of contiguous tensors results are contiguous, and C++'s strides say so.
            plain = all(is_contiguous(t, o.dst.shape) for t, o in zip(given, operands, strict=True))
            known[key] = None if plain else _global_strides(name, func, loc, kw, operands, len(outs))
        strides = known[key]
        if strides is None:
            return result
        each = iter(zip(outs, strides, strict=True))
        memories = {memory_of(t) for t in given}

        def show(t: torch.Tensor) -> torch.Tensor:
            out, stride = next(each)
            return t if memory_of(t) in memories else shows_order(t, out.shape, stride)

        return map_tensors(result, show)

    return run


def _global_strides(
    name: str, func: Any, loc: Sequence[Any], kw: dict[str, Any], operands: Sequence[OperandPlan], count: int
) -> Strides | None:
    """Strides of the results on one device; None where the function does not run without values."""
    found: list[tuple[int, ...]] = []
    try:
        with unseen_by_modes(), torch.no_grad():
            args, kwargs = list(map_tensors(list(loc), _meta)), map_tensors(kw, _meta)
            for o in operands:
                local = get_at(loc, kw, o.path)
                stride = global_stride(local, o.dst.shape)
                put_at(args, kwargs, o.path, torch.empty_strided(o.dst.shape, stride, dtype=local.dtype, device="meta"))
            if name in _STRIDES_OF_ADD:
                func, kwargs = torch.add, {}
            map_tensors(func(*args, **kwargs), lambda t: found.append(t.stride()))
    except Exception:  # whatever it is, the function has run on the local tensors
        return None
    return tuple(found) if len(found) == count else None


def _meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
