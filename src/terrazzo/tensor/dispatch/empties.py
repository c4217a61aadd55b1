"""Ranks that hold no row along some dim, or one.

Many functions refuse tensors without elements. The rank with an empty shard would raise, while the others would go on
and wait for it. So when the plan is made every rank tests the same thing: do the function and its gradient work on the
shapes of the rank with the empty shard?

Whether a tensor is contiguous is read from the local tensor's strides (`tensor.strides`), and must be the same on every
rank. But C++ gives a tensor any stride along a dim of one row, and any strides if it has no elements. So on such a rank
the function also runs on meta tensors of the global shapes, once for each combination of strides, and the strides of
its results are noted on the local results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from terrazzo._torch.dispatching import unseen
from terrazzo.layout import Layout, coordinates_of_all_shapes, leaves_a_rank_empty
from terrazzo.tensor.dispatch.planner import CallPlan, OperandPlan
from terrazzo.tensor.dispatch.spec import LocalFunction, Spec
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, on_stand_ins
from terrazzo.tensor.strides import Known, is_contiguous, is_thin, note_known, strides_in_memory, what_strides_say

Trial: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]
"""Whether the function works on every rank: (function, args with locals, kwargs with locals) -> answer."""


def trial_of(spec: Spec, plan: CallPlan, inplace: bool = False) -> Trial | None:
    """The trial of a plan under which some rank has an empty shard; None if there is none, so that nothing can fail.

    It is made once for each combination of dtypes, because a function may take empty tensors of some dtypes only. A
    rule that replaces the local function is responsible for empty shards itself.
    """
    layouts = [o.dst for o in plan.operands]
    # `localize` may return None on some ranks; whether the rule has one is the same on all ranks.
    if spec.localize is not None or spec.never_empty or not any(leaves_a_rank_empty(layout) for layout in layouts):
        return None
    outcomes: dict[tuple[torch.dtype, ...], bool] = {}

    def trial(func: Any, loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
        dtypes = tuple([get_at(loc, kw, o.path).dtype for o in plan.operands])
        works = outcomes.get(dtypes)
        if works is None:
            works = outcomes[dtypes] = _works_everywhere(spec, plan, func, loc, kw, inplace)
        return works

    return trial


def takes_empty_shards(
    spec: Spec, plan: CallPlan, func: Any, loc: Sequence[Any], kw: Mapping[str, Any], inplace: bool = False
) -> bool:
    """True when no rank has an empty shard under the plan, or when the caller's function works on one."""
    trial = trial_of(spec, plan, inplace)
    return trial is None or trial(func, loc, kw)


def _works_everywhere(
    spec: Spec, plan: CallPlan, func: Any, loc: Sequence[Any], kw: Mapping[str, Any], inplace: bool
) -> bool:
    layouts = [o.dst for o in plan.operands]
    tried: set[tuple[tuple[int, ...], ...]] = set()
    for at in coordinates_of_all_shapes([*layouts, *plan.outs]):
        shapes = tuple(layout.lengths(at) for layout in layouts)
        if shapes not in tried and not all(prod(s) or not prod(o.shape) for s, o in zip(shapes, layouts, strict=True)):
            tried.add(shapes)
            promised = [tuple(out.lengths(at)) for out in plan.outs]
            if not _works(spec, plan, func, loc, kw, shapes, promised, inplace):
                return False
    return True


def _works(
    spec: Spec,
    plan: CallPlan,
    func: Any,
    loc: Sequence[Any],
    kw: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    promised: Sequence[tuple[int, ...]],
    inplace: bool,
) -> bool:
    probes: list[torch.Tensor] = []
    for i, (o, shape) in enumerate(zip(plan.operands, shapes, strict=True)):
        local = get_at(loc, kw, o.path)
        written = inplace and o.path == (0,)
        # Tensors with elements are expanded from one element, except those that are written to.
        probe = local.new_zeros(shape) if written else local.new_zeros(()).expand(shape)
        differentiable = not written and i not in spec.unread and (local.is_floating_point() or local.is_complex())
        probes.append(probe.requires_grad_(differentiable))
    try:
        with unseen(), torch.enable_grad():
            result = on_stand_ins(func, loc, kw, [o.path for o in plan.operands], probes)
            outs: list[torch.Tensor] = []
            map_tensors(result, outs.append)
            if [tuple(t.shape) for t in outs] != list(promised):
                return False
            # What was moved to the meta device sends no gradient back, on any rank.
            wanted = [t for t in outs if t.requires_grad and t.is_meta is probes[0].is_meta]
            if wanted:
                torch.autograd.backward(wanted, [torch.zeros_like(t) for t in wanted])
                # If an input gets no gradient here, its backward does not run, while the other ranks' backward
                # communicates and would wait for this rank.
                return all(t.grad is not None for t in probes if t.requires_grad and t.is_leaf)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True


# ------------------------------------------------------------------ one row


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

    def say_it(key: tuple[Any, ...], given: list[torch.Tensor], kw: dict[str, Any]) -> bool:
        """New results of contiguous tensors are contiguous, and C++'s strides say so if those of the tensors do."""
        if is_view or any(noted for noted, _ in key) or "memory_format" in kw:
            return False
        return all(is_contiguous(t, o.dst.shape) for t, o in zip(given, operands, strict=True))

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        given = [get_at(loc, kw, path) for path in paths]
        key = tuple([what_strides_say(t) for t in given])
        result = func(*loc, **kw) if local is None else local(func, loc, kw)
        try:
            noted = to_note[key]
        except KeyError:
            strides = None if say_it(key, given, kw) else _global_strides(name, func, loc, kw, operands, outs)
            made: list[torch.Tensor] = []
            map_tensors(result, made.append)
            if strides is not None and not all(map(_fit, made, strides)):
                strides = None
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


def _fit(local: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the dims along which the rank holds several rows are in the same order in both.

    Some functions give meta tensors other strides than real ones.
    """
    dims = [d for d, n in enumerate(local.shape) if n > 1] if local.numel() else []
    return sorted(dims, key=local.stride().__getitem__) == sorted(dims, key=strides.__getitem__)


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
        with unseen(), torch.no_grad():
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
    return tuple(t.stride() for t in found)


def _meta(t: torch.Tensor, shape: Any = None, strides: Any = None) -> torch.Tensor:
    return torch.empty_strided(shape or t.shape, strides or t.stride(), dtype=t.dtype, device="meta")
