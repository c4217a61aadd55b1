"""The first call of a function with these layouts: it is compiled to a route, which later calls run.

The arguments are put in their places (`ops.forms`), the operation's entry is looked up (`ops.table`), and what it says
becomes a closure: a plan for a rule, the decomposition, the handler, the body, or replicate-and-run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from terrazzo._torch.dispatching import run_without_overrides_once, without_subclass_functions
from terrazzo.errors import CommError
from terrazzo.tensor.dispatch.empties import trial_of
from terrazzo.tensor.dispatch.fallback import replicate_and_run
from terrazzo.tensor.dispatch.inplace import run_in_place, with_out
from terrazzo.tensor.dispatch.keys import Route, any_number, remember, routes
from terrazzo.tensor.dispatch.names import alias_of, canonical_name
from terrazzo.tensor.dispatch.outside_mesh import not_known, results_outside_mesh, route_outside_mesh
from terrazzo.tensor.dispatch.overrides import OVERRIDES, Decomposed, leads_to_override, run_composite, take_apart
from terrazzo.tensor.dispatch.plain import admit_plain_tensors, check_one_mesh, describe, first_layout, in_transform
from terrazzo.tensor.dispatch.planner import CallPlan, make_plan
from terrazzo.tensor.dispatch.routes import first_run
from terrazzo.tensor.dispatch.shapes import check_shapes
from terrazzo.tensor.dispatch.spec import Call, Spec
from terrazzo.tensor.dispatch.terms import are_kept, checking_terms, passing_terms, reduced_first
from terrazzo.tensor.dtensor import DTensor, key_of_call
from terrazzo.tensor.links import links, plain_tensors_replicated
from terrazzo.tensor.ops.forms import Form, form_of, signatures, with_integers
from terrazzo.tensor.ops.table import Context, Operation, apply_rule, operation, taking

Key = tuple[Any, ...] | None

# Before PyTorch 2.13 the body of a Python function can only be run by skipping its first check for overrides.
_skip_one_hop = run_without_overrides_once


def call_without_route(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Any:
    """Run `func`, and cache its route under `key` unless that is None."""
    if key is None and in_transform([*args, *kwargs.values()]):
        with without_subclass_functions():  # a transform takes it apart, and calls operators of the DTensors inside
            return func(*args, **kwargs)
    if kwargs:
        if kwargs.get("out") is not None:
            return with_out(func, args, kwargs)
        form = form_of(func, args, kwargs)
        if form is not None:
            return _call_in_form(form, func, args, kwargs, key)
    numbers = with_integers(func, args, kwargs)
    if numbers is not None:
        return func(*numbers[0], **numbers[1])
    name, inplace = canonical_name(func)
    entry = operation(name, inplace)
    if entry.context is not None and entry.context.is_entered():
        result = entry.context.compute(func, args, kwargs)
        if result is not NotImplemented:
            return result
        key = None
    if entry.how == "handler" and func not in OVERRIDES:
        key = _whatever_the_numbers(func, key)
        return _run_and_remember(_by(entry, func, args, kwargs), func, args, kwargs, key)
    if key is None:
        admitted = admit_plain_tensors(name, args, kwargs, entry.takes_plain)
        if admitted is not None:
            return func(*admitted[0], **admitted[1])
    call, loc, kw = describe(name, inplace, func, args, kwargs)
    if not call.operands:
        return func(*loc, **kw)
    check_one_mesh(call)
    if call.operands[0].layout.coord is None and entry.draws:
        return _by(entry, func, args, kwargs)(func, args, loc, kw, dict(kwargs))
    if OVERRIDES:
        override = OVERRIDES.get(func)
        if isinstance(override, Decomposed):
            return _run_and_remember(override, func, args, kwargs, key)
        if override is not None:
            own = override(call, args, kwargs)
            planned = None if own is None else _run_planned(call, own, args, loc, kw, kwargs, _run_body_or_replicate)
            if planned is None:
                return _run_and_remember(_run_body_or_replicate, func, args, kwargs, key)
            remember(key, planned[1])
            return planned[0]
        if leads_to_override(func, args, kwargs):
            remember(key, take_apart)
            return take_apart(func, args, loc, kw, kwargs)
    if entry.any_number or entry.how != "rule":
        key = _whatever_the_numbers(func, key)
    if inplace:
        if isinstance(func, types.FunctionType):
            return _run_and_remember(_run_body, func, args, kwargs, key)
        return run_in_place(call, args, loc, kw, kwargs, key)
    way = _by(entry, func, args, kwargs)
    if call.operands[0].layout.coord is None:
        way = _without_communication(way, name, call.operands[0].layout.mesh)
    if entry.how == "rule" and not _wants_in_place(func, args, kwargs):
        spec = apply_rule(call)
        if spec is not None and spec.guard is not None:
            route = _guarded(spec.guard, spec, call, way)
            remember(key, route)
            return route(func, args, loc, kw, dict(kwargs))
        planned = None if spec is None else _run_planned(call, spec, args, loc, kw, kwargs, way)
        if planned is not None:
            remember(key, _outside(entry.context, planned[1]))
            return planned[0]
        if spec is None and not entry.draws:
            check_shapes(call, loc, kw)
    remember(key, _outside(entry.context, way))
    return way(func, args, [], {}, dict(kwargs))


def _whatever_the_numbers(func: Any, key: Key) -> Key:
    """Note that routes of `func` do not depend on numbers; None if `key` has those of this call."""
    if func in any_number:
        return key
    any_number.add(func)
    return None


def _call_in_form(form: Form, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Any:
    """Run the call with its arguments in their places; the caller's form then uses the route of that form."""
    placed, named = form.apply(args, kwargs)
    own_key = None if key is None else key_of_call(func, placed, named)
    result = call_without_route(func, placed, named, own_key)
    route = None if own_key is None else routes.get(own_key)
    if route is not None:
        remember(key, _in_form(form, route))
    return result


def _in_form(form: Form, route: Route) -> Route:
    names = [value for kind, value in form.order if kind == "given"]
    if len(names) > 1 and len(names) == len(form.order) and not form.keep:
        given = itemgetter(*names)

        def run_given(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
            return route(func, [*args, *given(kwargs)], [*loc, *given(kw)], {}, {})

        return run_given

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        own_args, own_kwargs = form.apply(args, kwargs)
        own_loc, own_kw = form.apply(loc, kw)
        return route(func, own_args, own_loc, own_kw, own_kwargs)

    return run


def _run_planned(
    call: Call,
    spec: Spec,
    args: Sequence[Any],
    loc: list[Any],
    kw: dict[str, Any],
    kwargs: Mapping[str, Any],
    way: Route,
) -> tuple[Any, Route] | None:
    """Run the call as planned, and return its result and route; None if there is no plan.

    Where some rank could not run it, for the dtypes of this call or of a later one, `way` runs.
    """
    if spec.is_view is None:
        spec.is_view = alias_of(call.name) == "view"
    plan = make_plan(call, spec)
    if plan is None:
        return None
    trial = trial_of(spec, plan)
    if trial is None:
        return _first_of_plan(call, spec, plan, args, loc, kw, kwargs)
    planned: Route | None = None

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        nonlocal planned
        if not trial(func, loc, kw):
            return way(func, args, loc, kw, kwargs)
        if planned is not None:
            return planned(func, args, loc, kw, kwargs)
        result, planned = _first_of_plan(call, spec, plan, args, loc, kw, kwargs)
        return result

    return run(call.func, args, loc, kw, dict(kwargs)), run


def _first_of_plan(
    call: Call,
    spec: Spec,
    plan: CallPlan,
    args: Sequence[Any],
    loc: list[Any],
    kw: dict[str, Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Route]:
    if call.operands[0].layout.coord is None:
        route = route_outside_mesh(call, plan)
        result = route(call.func, args, loc, kw, dict(kwargs))
    else:
        result, route = first_run(call.name, spec, plan, call.func, args, loc, kw, dict(kwargs))
    terms = passing_terms(spec, plan)
    if terms:
        route = checking_terms(route, terms)
        if not are_kept(result, terms, args, kwargs):
            result = reduced_first(call.func, terms, args, kwargs)
    return result, route


def _guarded(guard: Callable[[Sequence[Any], Mapping[str, Any]], bool], spec: Spec, call: Call, way: Route) -> Route:
    """The planned route for the calls that `guard` accepts; for the rest the other plan, or `way` if there is none."""
    planned = _planned_at_first(spec, call, way)
    other = way if spec.otherwise is None else _planned_at_first(spec.otherwise, call, way)

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        return (planned if guard(loc, kw) else other)(func, args, loc, kw, kwargs)

    return run


def _planned_at_first(spec: Spec, call: Call, way: Route) -> Route:
    """The planned route, made when the first call comes; `way` where there is no plan."""
    planned: Route | None = None

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        nonlocal planned
        if planned is not None:
            return planned(func, args, loc, kw, kwargs)
        first = _run_planned(call, spec, args, list(loc), dict(kw), kwargs, way)
        planned = way if first is None else first[1]
        return way(func, args, loc, kw, kwargs) if first is None else first[0]

    return run


def _outside(context: Context | None, route: Route) -> Route:
    """The route of an operation that may be computed in another way inside a context (`ops.table.Context`)."""
    if context is None:
        return route

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        if context.is_entered():
            return call_without_route(func, args, kwargs, None)
        return route(func, args, loc, kw, kwargs)

    return run


def _run_and_remember(route: Route, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Any:
    remember(key, route)
    return route(func, args, [], {}, dict(kwargs))


def _without_communication(way: Route, name: str, mesh: Any) -> Route:
    """`way` on a rank outside the mesh, which cannot communicate there."""

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        try:
            return way(func, args, [], {}, dict(kwargs))
        except CommError as error:
            raise not_known(name, mesh) from error

    return run


def _by(entry: Operation, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Route:
    """The route of an operation for calls that no plan covers."""
    by_default = _run_body_or_replicate
    if entry.how == "handler":
        handler = entry.function
        assert handler is not None

        def run_handler(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
            result = handler(func, args, kwargs)
            return by_default(func, args, loc, kw, kwargs) if result is NotImplemented else result

        return run_handler
    decomposition = entry.function if entry.how == "decomposition" else entry.otherwise
    if decomposition is not None:
        decomposed = taking(decomposition, func, args, kwargs)
        if decomposed is None:
            return by_default

        def run_decomposition(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
            result = decomposed(args, kwargs)
            return by_default(func, args, loc, kw, kwargs) if result is NotImplemented else result

        return run_decomposition
    return _run_composite if entry.how == "body" else by_default


def _run_body_or_replicate(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    if isinstance(func, types.FunctionType):
        return _run_body(func, args, loc, kw, kwargs)
    layout = first_layout([*args, *kwargs.values()])
    if layout is not None and layout.coord is None:
        call, own_loc, own_kw = describe(canonical_name(func)[0], False, func, args, kwargs)
        return results_outside_mesh(call, None, args, own_loc, own_kw, kwargs)
    return replicate_and_run(canonical_name(func)[0], func, args, kwargs)


def _run_composite(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    if isinstance(func, types.FunctionType):
        return _run_body(func, args, loc, kw, kwargs)
    with plain_tensors_replicated():
        return run_composite(func, args, kwargs)


def _run_body(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    """Run the Python body of a PyTorch function.

    Here and in C++ composites the caller's plain tensors have been refused already; plain tensors that the body creates
    (masks, offsets, random vectors) are the same on every rank.
    """
    with plain_tensors_replicated():
        if _skip_one_hop is None:
            return run_composite(func, args, kwargs)
        return _skip_one_hop(func, (DTensor,), tuple(args), kwargs)


def _wants_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a Python function has `inplace=True`: its body then writes the first argument itself."""
    if not isinstance(func, types.FunctionType):
        return False
    known = signatures(func)
    if not known or "inplace" not in known[0].positional:
        return False
    at = known[0].positional.index("inplace")
    return bool(args[at] if at < len(args) else kwargs.get("inplace"))


links.miss = call_without_route
