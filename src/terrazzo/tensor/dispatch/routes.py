"""Routes: plans as closures, which are the cheapest to run repeatedly.

`first_run` executes a plan once, checks that the local results have the shapes that the layouts say, and returns the
route that later calls with the same key use without this check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from terrazzo._torch.tensors import base_of, is_view, version_of
from terrazzo._torch.tensors import make_wrapper as _make
from terrazzo.comm import observe
from terrazzo.comm.axis import axis_of
from terrazzo.comm.differentiable import cast
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.copied_view import (
    CopiedView,
    check_autograd_allows,
    check_writable,
    mark_alias,
    mark_copied,
    pass_on,
)
from terrazzo.tensor.dispatch.empties import noting_strides, strides_say_little
from terrazzo.tensor.dispatch.keys import Route
from terrazzo.tensor.dispatch.names import alias_of
from terrazzo.tensor.dispatch.planner import CallPlan, OperandPlan
from terrazzo.tensor.dispatch.spec import HALF, Joined, OneArgument, Spec
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, put_at
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.redistribute import Gathered, redistribute_local
from terrazzo.tensor.strides import (
    check_no_overlap,
    in_order,
    is_contiguous,
    is_thin,
    keeping_strides,
    order_in_memory,
    with_strides_of,
)

_STRIDED = torch.strided  # passed by position, which saves a tenth of an operation's cost
_grad_enabled = torch.is_grad_enabled


def cast_memoised(source: DTensor, local: torch.Tensor, dims: tuple[int, ...], mesh: Any) -> torch.Tensor:
    """`local` as a value whose gradient is summed over `dims`; cached, so that one all-reduce serves all its uses."""
    memo = source._memo
    version = version_of(local)
    if type(memo) is tuple and memo[0] == version and memo[1] == dims and memo[2] is local and memo[4] == observe.era:
        return memo[3]
    result = memo.varying(local, dims) if type(memo) is Gathered else cast_fresh(local, dims, mesh)
    source._memo = (version, dims, local, result, observe.era)
    return result


def cast_fresh(local: torch.Tensor, dims: tuple[int, ...], mesh: Any) -> torch.Tensor:
    return cast(local, axis_of(mesh, dims))


def prepare(plan: CallPlan, mesh: Any) -> Callable[..., None]:
    """A function that redistributes and casts the operands, in place in `loc` and `kw`."""
    moves = [o for o in plan.operands if o.src is not o.dst]
    casts = [o for o in plan.operands if o.src is o.dst and o.cast]
    varying, copies_view = plan.varying, plan.copies_view

    def run(args: Sequence[Any], loc: list[Any], kw: dict[str, Any], kwargs: dict[str, Any]) -> None:
        for o in moves:
            before = get_at(loc, kw, o.path)
            local = redistribute_local(before, o.src, o.dst, varying)
            if copies_view:
                local = _in_order_of(before, local, o.src.shape)
            if o.cast and local.requires_grad and _grad_enabled():
                local = keeping_strides(cast_fresh(local, o.cast, mesh), local)
            put_at(loc, kw, o.path, local)
        if casts and _grad_enabled():
            for o in casts:
                local = get_at(loc, kw, o.path)
                if local.requires_grad:
                    source = get_at(args, kwargs, o.path)
                    put_at(loc, kw, o.path, keeping_strides(cast_memoised(source, local, o.cast, mesh), local))

    return run


def _in_order_of(before: torch.Tensor, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`local` with its dims in the memory order of `before`: whether a later view needs a copy depends on that."""
    if is_contiguous(before, shape):
        return local
    return in_order(local, shape, order_in_memory(before, shape))


def wrap_outputs(result: Any, outs: Sequence[Layout]) -> Any:
    """The result with DTensors in place of its tensors, in any nesting."""
    if isinstance(result, torch.Tensor):
        return wrap(result, outs[0])
    layouts = iter(outs)
    return map_tensors(result, lambda t: wrap(t, next(layouts)))


def check_shapes(name: str, result: Any, outs: Sequence[Layout]) -> None:
    tensors: list[torch.Tensor] = []
    map_tensors(result, tensors.append)
    if len(tensors) != len(outs) or any(t.shape != o.local_shape for t, o in zip(tensors, outs, strict=True)):
        raise DTensorError(
            f"{name}: on this rank the rule expects local results of shape {[tuple(o.local_shape) for o in outs]}, but "
            f"the local operation returned {[tuple(t.shape) for t in tensors]}; this is a bug in the rule, please "
            "report it"
        )


def _not_for_tensors(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
    return NotImplemented


def first_run(
    name: str,
    spec: Spec,
    plan: CallPlan,
    func: Any,
    args: Sequence[Any],
    loc: list[Any],
    kw: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Any, Route]:
    """Run the plan with checks; return the result and the route for later calls."""
    mesh = plan.operands[0].src.mesh
    if any(map(strides_say_little, plan.outs)):
        plan = replace(plan, local=noting_strides(name, plan.local, plan.operands, plan.outs, bool(spec.is_view)))
    needs_prepare = any(o.src is not o.dst or o.cast for o in plan.operands)
    ready = prepare(plan, mesh) if needs_prepare else None
    if alias_of(name) == "same" and not spec.is_view and plan.operands[0].path == (0,):
        route = _same_or_new(name, plan, ready)
        return route(func, args, loc, kw, kwargs), route
    if ready is not None:
        ready(args, loc, kw, kwargs)
    outs = plan.outs
    if plan.joined is not None and plan.joined.applies(loc, kw):
        result, outs = plan.joined.run(func, loc, kw), plan.joined_outs
    else:
        result = func(*loc, **kw) if plan.local is None else plan.local(func, loc, kw)
    if result is NotImplemented:  # of `x == [1]` or `x ** "a"`: Python asks the other operand, or answers itself
        return result, _not_for_tensors
    check_shapes(name, result, outs)
    wrapped = wrap_outputs(result, outs)
    if plan.copies_view:
        mark_copied(wrapped, name, args, kwargs)
    elif spec.is_view and type(args[0]) is CopiedView:
        mark_alias(wrapped, args[0], name)
    if isinstance(result, torch.Tensor) and not plan.copies_view:
        if not plan.moves and plan.local is None and all(_is_simple(o) for o in plan.operands):
            route = _simple(plan, mesh)
        else:
            route = _single(plan, ready)
    else:
        route = _general(name, plan, ready)
    if plan.joined is not None:
        route = _joining(plan, plan.joined, ready, route)
    return wrapped, _view_route(name, plan, route, isinstance(wrapped, DTensor)) if spec.is_view else route


def _is_simple(o: OperandPlan) -> bool:
    return not o.cast or (len(o.path) == 1 and type(o.path[0]) is int)


def _simple(plan: CallPlan, mesh: Any) -> Route:
    out = plan.outs[0]
    size = out.shape
    casts = tuple((o.path[0], o.cast) for o in plan.operands if o.cast)
    if not casts:

        def run_bare(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
            local = func(*loc, **kw)
            result: DTensor = _make(DTensor, size, None, None, None, local.dtype, _STRIDED, local.device)
            result._local = local
            result._layout = out
            result._memo = None
            return result

        return run_bare

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
        if _grad_enabled():
            for i, dims in casts:
                local = loc[i]
                if local.requires_grad:
                    loc[i] = cast_memoised(args[i], local, dims, mesh)
        return wrap(func(*loc, **kw), out)

    return run


def _single(plan: CallPlan, ready: Callable[..., None] | None) -> Route:
    out, local_function = plan.outs[0], plan.local

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
        if ready is not None:
            ready(args, loc, kw, kwargs)
        local = func(*loc, **kw) if local_function is None else local_function(func, loc, kw)
        return wrap(local, out)

    return run


def _joining(plan: CallPlan, joined: Joined, ready: Callable[..., None] | None, usual: Route) -> Route:
    """Runs `joined` where the dtypes of the local tensors ask for it, else the usual route."""
    outs, join, half_only = plan.joined_outs, joined.run, joined.half_only

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        if half_only and ((not kw and loc[0].dtype not in HALF) or not joined.applies(loc, kw)):
            return usual(func, args, loc, kw, kwargs)
        if ready is not None:
            ready(args, loc, kw, kwargs)
        return wrap_outputs(join(func, loc, kw), outs)

    if not half_only or ready is not None or plan.local is not None or len(plan.outs) != 1:
        return run
    out = plan.outs[0]

    def run_bare(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        """The most common case, terms of a dtype that is wide enough, without one more function call."""
        if kw or loc[0].dtype in HALF:
            return run(func, args, loc, kw, kwargs)
        return wrap(func(*loc), out)

    return run_bare


def _general(name: str, plan: CallPlan, ready: Callable[..., None] | None) -> Route:
    outs, local_function, copies = plan.outs, plan.local, plan.copies_view

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        if ready is not None:
            ready(args, loc, kw, kwargs)
        local = func(*loc, **kw) if local_function is None else local_function(func, loc, kw)
        result = wrap_outputs(local, outs)
        if copies:
            mark_copied(result, name, args, kwargs)
        return result

    return run


def _same_or_new(name: str, plan: CallPlan, ready: Callable[..., None] | None) -> Route:
    """For operations that return their argument itself where they have nothing to do.

    Where they do something, some of them return a view (`real`, `conj`).
    """
    out, local_function, moves = plan.outs[0], plan.local, plan.moves

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
        if ready is not None:
            ready(args, loc, kw, kwargs)
        given = loc[0]
        local = func(*loc, **kw) if local_function is None else local_function(func, loc, kw)
        if local is given:
            return args[0]
        result = wrap(local, out)
        if (moves or type(args[0]) is CopiedView) and is_view(local) and base_of(local) is base_of(given):
            if moves:
                mark_copied(result, name, args, kwargs)
            else:
                mark_alias(result, args[0])
        return result

    return run


def _view_route(name: str, plan: CallPlan, run: Route, is_one: bool) -> Route:
    """For views: a view of a copied view is a copied view. `is_one`: the result is one tensor, not a tuple."""
    positional = plan.operands[0].path[0] == 0
    if is_one and positional and not plan.copies_view and not any(o.cast for o in plan.operands):
        return _simple_view(name, plan)

    def run_view(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        result = run(func, args, loc, kw, kwargs)
        if args and type(args[0]) is CopiedView and not plan.copies_view:
            mark_alias(result, args[0], name)
        return result

    return run_view


def _simple_view(name: str, plan: CallPlan) -> Route:
    out, local_function = plan.outs[0], plan.local
    size = out.shape
    if isinstance(local_function, OneArgument):
        function, argument = local_function.function, local_function.argument
        otherwise = local_function.otherwise or function

        def run_one(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
            try:
                local = function(loc[0], argument)
            except RuntimeError:
                local = otherwise(loc[0], argument)
            result: DTensor = _make(DTensor, size, None, None, None, local.dtype, _STRIDED, local.device)
            result._local = local
            result._layout = out
            result._memo = None
            if type(args[0]) is CopiedView:
                mark_alias(result, args[0], name)
            return result

        return run_one

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> DTensor:
        result = wrap(func(*loc, **kw) if local_function is None else local_function(func, loc, kw), out)
        if type(args[0]) is CopiedView:
            mark_alias(result, args[0], name)
        return result

    return run


IGNORES_REPEATS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("zero", "masked_fill", "index_fill", "index_put", "tril", "triu"), lambda *args, **kwargs: True),
    "fill": lambda input, value: not isinstance(value, torch.Tensor),
    "conj_physical": lambda input: not input.is_complex(),
}
"""In-place functions that accept an expanded tensor, and in which calls; others raise for one."""


def in_place_route(name: str, plan: CallPlan) -> Route:
    """The route of an in-place operation: it writes the first operand's local tensor, and the layout stays."""
    mesh = plan.operands[0].src.mesh
    ready = prepare(plan, mesh) if any(o.src is not o.dst or o.cast for o in plan.operands) else None
    local_function = plan.local
    layout = plan.operands[0].src
    # Checked on every rank before communicating: otherwise ranks wait for one on which C++ raises later.
    looks = ready is not None or is_thin(layout.local_shape, layout.shape)
    has_single_rows = 1 in layout.local_shape
    ignores = IGNORES_REPEATS.get(name)

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        target = args[0]
        is_copied = type(target) is CopiedView
        if is_copied:
            check_writable(target)
        if looks and (ignores is None or not ignores(*loc, **kw)):
            check_autograd_allows(target)  # in C++'s order
            check_no_overlap(loc[0], layout.shape)
        if ready is not None:
            ready(args, loc, kw, kwargs)
        if has_single_rows:
            for o in plan.operands[1:]:
                put_at(loc, kw, o.path, with_strides_of(loc[0], get_at(loc, kw, o.path)))
        if local_function is None:
            func(*loc, **kw)
        else:
            local_function(func, loc, kw)
        if is_copied:
            pass_on(target)
        return target

    return run
