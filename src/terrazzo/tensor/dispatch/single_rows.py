"""Strides of results on a rank that holds one row along some dim, or none.

Whether a tensor is contiguous is read from the local tensor's strides (`tensor.strides`), and must be the same on every
rank. But C++ gives a tensor any stride along a dim of one row, and any strides if it has no elements. So on such a rank
the function also runs on meta tensors of the global shapes, once for each combination of strides, and the strides of
its results are noted on the local results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo._torch.dispatching import unseen_by_modes
from terrazzo.layout import Layout
from terrazzo.tensor.dispatch.planner import OperandPlan
from terrazzo.tensor.dispatch.spec import LocalFunction
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, on_stand_ins
from terrazzo.tensor.strides import Known, is_contiguous, is_thin, note_known, strides_in_memory, what_strides_say

Strides = tuple[tuple[int, ...], ...]

_STRIDES_OF_ADD = frozenset(
    [
        *("copysign", "div", "floor_divide", "heaviside", "ldexp", "logaddexp", "logical_and", "logical_or"),
        *("logical_xor", "special_xlog1py", "xlogy"),
    ]
)
"""Elementwise functions that run in Python on meta tensors, and give them other strides than C++ gives real ones."""


def strides_say_little(layout: Layout) -> bool:
    """Whether this rank has no row, or only one of several, along some dim."""
    return len(layout.local_shape) == layout.ndim and is_thin(layout.local_shape, layout.shape)


def noting_strides(
    name: str, local: LocalFunction | None, operands: Sequence[OperandPlan], outs: Sequence[Layout], is_view: bool
) -> LocalFunction:
    """`local` (the caller's function if None), which notes the global strides of its results."""
    paths = [o.path for o in operands]
    to_note: dict[tuple[Any, ...], list[Known | None] | None] = {}

    def say_it(key: tuple[Any, ...], given: list[torch.Tensor]) -> bool:
        """New results of contiguous tensors are contiguous, and C++'s strides say so if those of the tensors do."""
        if is_view or any(noted for noted, _ in key):
            return False
        return all(is_contiguous(t, o.dst.shape) for t, o in zip(given, operands, strict=True))

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        given = [get_at(loc, kw, path) for path in paths]
        key = tuple([what_strides_say(t) for t in given])
        result = func(*loc, **kw) if local is None else local(func, loc, kw)
        try:
            noted = to_note[key]
        except KeyError:
            strides = None if say_it(key, given) else _global_strides(name, func, loc, kw, operands, outs)
            noted = to_note[key] = None if strides is None else _known(outs, strides)
        if noted is None:
            return result
        each = iter(noted)

        def note(t: torch.Tensor) -> torch.Tensor:
            known = next(each)
            if known is not None and not any(t is g for g in given):  # a function may return its argument
                note_known(t, known)
            return t

        return note(result) if isinstance(result, torch.Tensor) else map_tensors(result, note)

    return run


def _known(outs: Sequence[Layout], strides: Strides) -> list[Known | None]:
    return [(tuple(o.shape), s) if strides_say_little(o) else None for o, s in zip(outs, strides, strict=True)]


def _global_strides(
    name: str,
    func: Any,
    loc: Sequence[Any],
    kw: dict[str, Any],
    operands: Sequence[OperandPlan],
    outs: Sequence[Layout],
) -> Strides | None:
    """Strides of the results on one device; None where the function does not run without values."""
    found: list[torch.Tensor] = []
    given = [get_at(loc, kw, o.path) for o in operands]
    try:
        with unseen_by_modes(), torch.no_grad():
            whole = [
                _meta(t, o.dst.shape, strides_in_memory(t, o.dst.shape)) for t, o in zip(given, operands, strict=True)
            ]
            args, kwargs = map_tensors(list(loc), _meta), map_tensors(kw, _meta)
            if name in _STRIDES_OF_ADD:
                func, kwargs = torch.add, {}
            map_tensors(on_stand_ins(func, args, kwargs, [o.path for o in operands], whole), found.append)
    except Exception:  # whatever it is, the function has run on the local tensors
        return None
    if [tuple(t.shape) for t in found] != [tuple(out.shape) for out in outs]:
        return None
    # Along a dim of size 1 any stride is right.
    return tuple(tuple(s if n != 1 else 0 for s, n in zip(t.stride(), t.shape, strict=True)) for t in found)


def _meta(t: torch.Tensor, shape: Any = None, strides: Any = None) -> torch.Tensor:
    return torch.empty_strided(shape or t.shape, strides or t.stride(), dtype=t.dtype, device="meta")
