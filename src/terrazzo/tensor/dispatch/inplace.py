"""In-place operations: the first operand keeps its layout, whatever layouts the others have.

Where the rule can give that layout, the caller's own in-place function runs on the local tensors. Where it cannot (a
nonlinear write to partial terms, a cumulative one along a sharded dim), the functional form runs, and its result is
redistributed to the layout and copied over the local tensor. Operations that change the shape rebind the object.

With `out=` the result is computed, then written to the given tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from terrazzo._torch.dispatching import OpOverload, overload_name
from terrazzo._torch.storages import memory_of
from terrazzo._torch.tensors import is_view
from terrazzo.errors import DTensorError, MixedTensorError, TerrazzoError
from terrazzo.tensor.copied_view import check_autograd_allows, check_keeps_shape, check_writable, pass_on
from terrazzo.tensor.dispatch.empties import Trial, trial_of
from terrazzo.tensor.dispatch.fallback import replicate_and_run_in_place
from terrazzo.tensor.dispatch.keys import Route, remember
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.outside_mesh import in_place_outside_mesh, without_data
from terrazzo.tensor.dispatch.plain import replicated
from terrazzo.tensor.dispatch.planner import make_plan
from terrazzo.tensor.dispatch.routes import in_place_route
from terrazzo.tensor.dispatch.spec import Call
from terrazzo.tensor.dispatch.structure import on_one_element
from terrazzo.tensor.dispatch.terms import checking_terms_in_place, keep_terms, passing_terms, without_terms
from terrazzo.tensor.dtensor import DTensor, become, wrap
from terrazzo.tensor.links import links
from terrazzo.tensor.ops.table import apply_rule
from terrazzo.tensor.redistribute import redistribute_local
from terrazzo.tensor.strides import check_no_overlap

_PROMOTING = {"cumsum", "cumprod"}
"""Operations that turn integers and bools into int64, except in place."""
_RESHAPING = {"squeeze", "unsqueeze", "t", "transpose", "swapdims", "swapaxes", "as_strided"}


def run_in_place(
    call: Call,
    args: Sequence[Any],
    loc: list[Any],
    kw: dict[str, Any],
    kwargs: Mapping[str, Any],
    key: tuple[Any, ...] | None,
) -> Any:
    """Run `call.func` so that its first argument holds the result."""
    target = args[0] if args else None
    if not isinstance(target, DTensor):
        raise DTensorError(
            f"{call.name}_: an in-place operation with DTensors can only write to a DTensor, got "
            f"{type(target).__name__}"
        )
    check_writable(target)
    if call.name in _RESHAPING or call.name == "resize_as":
        check_keeps_shape(target)
    if call.name in _RESHAPING:
        check_autograd_allows(target)
        if target.requires_grad and not is_view(target._local) and target.is_leaf:
            return _reshape_leaf(call.name, target, args, kwargs)
        # Autograd must record the change of shape also under no_grad, so that the old graph is not lost.
        with torch.set_grad_enabled(torch.is_grad_enabled() or (target.requires_grad and not target.is_leaf)):
            become(target, getattr(torch.Tensor, call.name)(*args, **kwargs))
        return target
    if target._layout.coord is None:
        functional = _functional(call)
        result = None if functional is None else without_data(functional, call.operands, loc, kw)[0]
        if isinstance(result, torch.Tensor):
            _check_written(result, target)
        return in_place_outside_mesh(call, args, loc, kw, kwargs)
    if call.name == "resize_as" and isinstance(args[1], DTensor) and args[1].numel() == target.numel():
        become(target, cast(DTensor, target.reshape(args[1].shape)))
        return target
    spec = apply_rule(call)
    if spec is not None and spec.guard is not None:
        spec, key = spec.for_locals(loc, kw), None  # right for the dtypes of this call only
    if spec is not None and len(spec.outs) == 1 and tuple(spec.shapes[0]) == tuple(target.shape):
        plan = make_plan(call, spec, fixed_output=target._layout)
        stays = plan is not None and plan.operands[0].src is plan.operands[0].dst and not plan.operands[0].cast
        trial = None if plan is None or not stays else trial_of(spec, plan, inplace=True)
        if plan is not None and stays and (trial is None or trial(call.func, loc, kw)):
            run = in_place_route(call.name, plan)
            if terms := passing_terms(spec, plan, inplace=True):
                run = checking_terms_in_place(run, terms)
            if trial is not None:
                run = _if_it_works(run, trial)
            remember(key, run)
            return run(call.func, args, loc, kw, dict(kwargs))
    functional = _functional(call)
    if functional is None:
        return replicate_and_run_in_place(call.name, call.func, args, kwargs)
    if call.name in _PROMOTING:
        kwargs = {"dtype": target.dtype, **kwargs}
    # Backward may need the old values, which must not be the memory that is written to.
    before = target.clone() if torch.is_grad_enabled() and target.requires_grad else target
    write(target, functional(before, *args[1:], **kwargs))
    pass_on(target)
    return target


def _if_it_works(route: Route, trial: Trial) -> Route:
    """`route` for the dtypes whose empty shards the function takes; others are planned at each call."""

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        return route(func, args, loc, kw, kwargs) if trial(func, loc, kw) else links.miss(func, args, kwargs, None)

    return run


def _reshape_leaf(name: str, target: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """Without autograd; the local tensor stays the leaf, so that existing graphs still accumulate into its gradient."""
    result = getattr(torch.Tensor, name)(*args, **kwargs)
    if memory_of(result._local) != memory_of(target._local):
        raise DTensorError(
            f"{name}_: this change of shape needs communication, and the leaf (now {target._layout}) would not get the "
            "gradients of results that were computed from it before. Redistribute it before it is used, or use the "
            "operation without the underscore"
        )
    local = result._local
    target._local.as_strided_(local.size(), local.stride(), local.storage_offset())
    become(target, wrap(target._local, result._layout))
    return target


def _functional(call: Call) -> Any:
    if isinstance(call.func, OpOverload):
        packet = getattr(torch.ops.aten, call.name, None)
        return None if packet is None else getattr(packet, overload_name(call.func), None)
    for home in (torch.Tensor, torch, torch.nn.functional):
        functional = getattr(home, call.name, None)
        if functional is not None:
            return functional
    return None


def _check_written(value: torch.Tensor, target: DTensor) -> None:
    """Raise if a result cannot be written to the target."""
    if value.shape != target.shape:
        raise DTensorError(
            f"the result has shape {tuple(value.shape)} and cannot be written to a tensor of shape "
            f"{tuple(target.shape)}"
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")


def write(target: DTensor, value: DTensor) -> None:
    """Copy `value` over `target`, in `target`'s layout; differentiable."""
    _check_written(value, target)
    check_no_overlap(target._local, target._layout.shape)  # before communicating: some ranks have nothing to write
    if not keep_terms(value._layout, value.dtype, [target.dtype]):
        value = cast(DTensor, without_terms(value).to(target.dtype))
    local = redistribute_local(value._local, value._layout, target._layout)
    target._local.copy_(local)


# ------------------------------------------------------------------ out=


def with_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` without its `out`, write the result to `out`, and return it."""
    name, out = canonical_name(func)[0], kwargs["out"]
    try:
        result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if not isinstance(error, TerrazzoError) or error.__cause__ is not None:  # PyTorch's, perhaps with more words
            on_one_element(func, args, kwargs)  # its own error about `out`, which comes first
        raise
    outs, results = (out, result) if isinstance(out, (tuple, list)) else ((out,), (result,))
    makes_anew = not any(isinstance(a, torch.Tensor) for a in args)  # torch.eye and the like
    for target, value in zip(outs, results, strict=True):
        if makes_anew and isinstance(target, DTensor) and type(value) is torch.Tensor:
            value = replicated(value, target._layout)
        if not isinstance(target, DTensor) or not isinstance(value, DTensor):
            raise MixedTensorError(
                f"{name}: out= and the inputs must all be DTensors, but out is a {type(target).__name__} and the "
                f"result a {type(value).__name__}"
            )
        if value.dtype != target.dtype and target is out:
            _ask_cpp(func, args, kwargs, value.dtype)
        _write(name, target, value)
    return out


def _ask_cpp(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], type_of_result: torch.dtype) -> None:
    """Raise PyTorch's error for an `out` of another dtype: most functions do not cast to it, some cast to any."""
    out = kwargs["out"]
    fitting = torch.empty((1,) * out.ndim, dtype=type_of_result, device=out.device)
    try:
        on_one_element(func, args, {**kwargs, "out": fitting})
    except Exception:
        return  # the function does not work on one element, so nothing is known
    on_one_element(func, args, kwargs)


def _write(name: str, target: DTensor, value: DTensor) -> None:
    if torch.is_grad_enabled() and (target.requires_grad or value.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise DTensorError(f"{name}: a result of {value.dtype} cannot be cast to out's {target.dtype}")
    if target.shape == value.shape:
        target.copy_(value)
    elif target.numel():
        raise DTensorError(f"{name}: out has shape {tuple(target.shape)}, but the result has {tuple(value.shape)}")
    else:
        converted = value.to(target.dtype)
        assert isinstance(converted, DTensor)
        become(target, converted)
