"""What happens the first time a function meets these layouts.

In this order: functions with a meaning of their own (`specials`), the operation's rule, the body of a function
written in Python, the decomposition of the composites listed in `decompositions`, and last replicate-and-run
(`fallback`). A call that a rule covers leaves a plan behind; the next call with the same key runs that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo._torch.autograd import is_transformed
from terrazzo._torch.dispatching import run_without_overrides_once, without_subclass_functions
from terrazzo.errors import DTensorError, MixedTensorError
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.copied_view import CopiedView, mark_alias
from terrazzo.tensor.dispatch.absent import run_absent
from terrazzo.tensor.dispatch.aten import run_composite
from terrazzo.tensor.dispatch.empties import takes_empty_shards
from terrazzo.tensor.dispatch.fallback import replicate_and_run
from terrazzo.tensor.dispatch.inplace import run_in_place
from terrazzo.tensor.dispatch.keys import any_float, plans
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.overrides import OVERRIDES, leads_to_override, take_apart
from terrazzo.tensor.dispatch.planner import CallPlan, make_plan
from terrazzo.tensor.dispatch.runners import first_run, view_runner
from terrazzo.tensor.dispatch.spec import Call, Operand, Spec
from terrazzo.tensor.dtensor import DTensor, per_thread, plain_tensors_replicated, set_wrapper_data, wrap
from terrazzo.tensor.ops.table import COMPOSITES, DECOMPOSITIONS, apply_rule, works_on_any_float

PLAN_LIMIT = 16384
"""Cached plans at most; beyond it the cache starts anew, so that ever-changing shapes cannot grow it without bound."""

Special = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
specials: dict[str, Special] = {}
"""Functions by canonical name (in-place ones with their underscore) that are not a computation on locals."""

LOCAL_QUESTIONS = frozenset(
    [
        *(
            "is_complex",
            "is_floating_point",
            "is_signed",
            "is_inference",
            "is_conj",
            "is_neg",
            "is_tensor",
            "is_storage",
        ),
        *("_is_zerotensor", "can_cast", "promote_types", "result_type", "get_is_conj", "get_is_neg"),
    ]
)
"""Questions about dtype and the like, which any rank's part answers."""


def _ask_local(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    return func(*loc, **kw)


# Before PyTorch 2.13 a function's body cannot be run without its asking for overrides again.
_skip_one_hop = run_without_overrides_once


def special(*names: str) -> Callable[[Special], Special]:
    """Register a handler; it may return NotImplemented to let the usual way go on."""

    def register(function: Special) -> Special:
        for name in names:
            specials[name] = function
        return function

    return register


def remember(key: tuple[Any, ...] | None, plan: Any) -> None:
    """Cache a plan, within bounds."""
    if key is None:
        return
    if len(plans) >= PLAN_LIMIT:
        plans.clear()
    plans[key] = plan


def call_without_plan(
    func: Any, types_: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: tuple[Any, ...] | None
) -> Any:
    """Run `func`, and cache how when that is possible."""
    name, inplace = canonical_name(func)
    handler = specials.get(name + "_" if inplace else name)
    if handler is not None and func not in OVERRIDES:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if kwargs.get("out") is not None:
        return _with_out(func, args, kwargs)
    if key is None:
        admitted = admit_plain_tensors(name, func, args, kwargs)
        if admitted is not None:
            return func(*admitted[0], **admitted[1])
    if name in LOCAL_QUESTIONS:
        remember(key, _ask_local)
    call, loc, kw = describe(name, inplace, func, args, kwargs)
    if not call.operands or name in LOCAL_QUESTIONS:
        return func(*loc, **kw)
    check_one_mesh(call)
    if call.operands[0].layout.coord is None:
        return run_absent(call, args)
    if OVERRIDES:
        override = OVERRIDES.get(func)
        if override is not None:
            overriding = override(call, args, kwargs)
            chosen = make_plan(call, overriding)
            assert chosen is not None
            return _run_planned(call, overriding, chosen, args, loc, kw, kwargs, key)
        if leads_to_override(func, args, kwargs):
            remember(key, take_apart)
            return take_apart(func, args, loc, kw, kwargs)
    if func not in any_float and works_on_any_float(name):
        any_float.add(func)
        key = None  # it was made for these floats alone
    python_body = isinstance(func, types.FunctionType)
    if inplace or (python_body and kwargs.get("inplace")):
        if python_body:
            return _run_body(func, types_, args, kwargs)
        return run_in_place(call, args, loc, kw, kwargs, key, remember)
    spec = apply_rule(call)
    plan = None if spec is None else make_plan(call, spec)
    if spec is not None and plan is not None and takes_empty_shards(spec, plan, func, loc, kw):
        return _run_planned(call, spec, plan, args, loc, kw, kwargs, key)
    decomposition = DECOMPOSITIONS.get(name)
    if decomposition is not None:
        result = decomposition(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if python_body:
        return _run_body(func, types_, args, kwargs)
    if name in COMPOSITES:
        with plain_tensors_replicated():
            return run_composite(func, args, kwargs)
    return replicate_and_run(name, func, args, kwargs)


def _run_planned(
    call: Call,
    spec: Spec,
    plan: CallPlan,
    args: Sequence[Any],
    loc: list[Any],
    kw: dict[str, Any],
    kwargs: Mapping[str, Any],
    key: tuple[Any, ...] | None,
) -> Any:
    """Run the call as planned, and keep the plan."""
    result, run = first_run(call.name, plan, call.func, args, loc, kw, dict(kwargs))
    if spec.is_view and type(args[0]) is CopiedView and not plan.copies_view:
        mark_alias(result, args[0])
    remember(key, view_runner(plan, run, isinstance(result, DTensor)) if spec.is_view else run)
    return result


def _run_body(func: Any, types_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the body of a function of PyTorch's written in Python.

    Here and in C++ composites the caller's plain tensors were refused before; those that the body makes (masks,
    offsets, random vectors) are the same on every rank.
    """
    with plain_tensors_replicated():
        if _skip_one_hop is None:
            return run_composite(func, args, kwargs)
        return _skip_one_hop(func, types_, tuple(args), dict(kwargs))


def describe(
    name: str, inplace: bool, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, list[Any], dict[str, Any]]:
    """The call as rules see it, and its arguments with locals in place of DTensors."""
    operands: list[Operand] = []

    def walk(value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
        if isinstance(value, DTensor):
            operand = Operand(value._layout, path)
            operands.append(operand)
            return operand, value._local
        if type(value) in (list, tuple):
            pairs = [walk(v, (*path, i)) for i, v in enumerate(value)]
            return type(value)([p[0] for p in pairs]), type(value)([p[1] for p in pairs])
        return value, value

    pairs = [walk(a, (i,)) for i, a in enumerate(args)]
    named = {k: walk(v, (k,)) for k, v in kwargs.items()}
    call = Call(name, func, tuple(p[0] for p in pairs), {k: v[0] for k, v in named.items()}, operands, inplace)
    return call, [p[1] for p in pairs], {k: v[1] for k, v in named.items()}


def check_one_mesh(call: Call) -> None:
    meshes = {o.layout.mesh for o in call.operands}
    if len(meshes) > 1:
        raise DTensorError(
            f"{call.name}: its DTensors live on different meshes, {', '.join(str(m) for m in meshes)}; bring them to "
            "one "
            "with x.redistribute(mesh, placements)"
        )


def _notes_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What those who made the DTensors among the arguments have to say about them."""
    notes = [value.__dict__.get("_note") for value in (*args, *kwargs.values()) if isinstance(value, DTensor)]
    return "".join(f". {note}" for note in dict.fromkeys(notes) if note)


def admit_plain_tensors(
    name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Plain tensors as replicated DTensors where that is allowed (scalars, `implicit_replication`); None: there are
    none."""
    mesh_layout = _first_layout(list(args) + list(kwargs.values()))
    if mesh_layout is None:
        return None
    mesh = mesh_layout.mesh
    found = False

    def walk(value: Any, where: str) -> Any:
        nonlocal found
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if is_transformed(value):
                raise DTensorError(
                    f"{name}: {where} belongs to a torch.func transform (vmap, vjp) and meets a DTensor from outside "
                    "of it; give the transformed function all DTensors as arguments that are transformed, or use "
                    "torch.func.grad or torch.autograd"
                )
            if value.dim() and not per_thread.implicit_replication:
                raise MixedTensorError(
                    f"{name}: {where} is a plain {type(value).__name__} of shape {tuple(value.shape)} and meets "
                    "DTensors. "
                    "Either make it one (distribute_tensor(t, mesh, placements), or DTensor.from_local for each rank's "
                    "part), or run the call inside terrazzo.tensor.experimental.implicit_replication() if every rank "
                    "holds the same value" + _notes_on(args, kwargs)
                )
            found = True
            layout = Layout.of(mesh, (Replicate(),) * len(mesh_layout.mesh_shape), tuple(value.shape))
            return wrap(value, layout)
        if type(value) in (list, tuple):
            return type(value)([walk(v, f"{where}[{i}]") for i, v in enumerate(value)])
        return value

    new_args = [walk(a, f"argument {i}") for i, a in enumerate(args)]
    new_kwargs = {k: walk(v, f"argument {k!r}") for k, v in kwargs.items()}
    return (new_args, new_kwargs) if found else None


def _first_layout(values: Sequence[Any]) -> Layout | None:
    for v in values:
        if isinstance(v, DTensor):
            return v._layout
        if type(v) in (list, tuple):
            found = _first_layout(v)
            if found is not None:
                return found
    return None


def _with_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    out = kwargs["out"]
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    outs, results = (out, result) if isinstance(out, (tuple, list)) else ((out,), (result,))
    makes_anew = not any(isinstance(a, torch.Tensor) for a in args)  # torch.eye and its like
    for target, value in zip(outs, results, strict=True):
        if (
            makes_anew
            and isinstance(target, DTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
        ):
            value = wrap(
                value, Layout.of(target.device_mesh, (Replicate(),) * target.device_mesh.ndim, tuple(value.shape))
            )
        if not isinstance(target, DTensor) or not isinstance(value, DTensor):
            raise MixedTensorError(
                f"{canonical_name(func)[0]}: out= and the inputs must all be DTensors, out is {type(target).__name__}"
            )
        if target.shape != value.shape:
            if target.numel():
                raise DTensorError(
                    f"{canonical_name(func)[0]}: out has shape {tuple(target.shape)}, the result {tuple(value.shape)}"
                )
            converted = value.to(target.dtype)
            assert isinstance(converted, DTensor)
            become(target, converted)
        else:
            with torch.no_grad():
                target.copy_(value)
    return out


def become(target: DTensor, value: DTensor) -> None:
    """Turn `target` into `value`, keeping the object: for in-place operations that change the shape."""
    with without_subclass_functions():
        set_wrapper_data(target, wrap(value._local.detach(), value._layout))
    target._local, target._layout, target._memo = value._local, value._layout, value._memo


def run_again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The hot path's entry for code that already knows that DTensors are among the arguments."""
    return DTensor.__torch_function__(func, (DTensor,), args, dict(kwargs))


__all__ = [
    "become",
    "call_without_plan",
    "describe",
    "remember",
    "run_again",
    "special",
    "specials",
]
