"""Terms that pass an operation: they may change their dtype only if that keeps every number.

A plan depends on no dtype, so it lets terms pass each function that is linear. If the function also converts them, by
its name (`half`), an argument, promotion or autocast, then each term is rounded, and the sum of rounded terms is not
the rounded sum: 70000 and -70000 in float16 give NaN. So the dtype of the result is compared with those of the terms.
If it cannot hold them, the terms are reduced first, and the function is called again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from terrazzo.layout import Layout, Partial
from terrazzo.tensor.dispatch.keys import Route
from terrazzo.tensor.dispatch.planner import CallPlan
from terrazzo.tensor.dispatch.spec import Spec
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, put_at
from terrazzo.tensor.dtensor import DTensor

Path = tuple[Any, ...]


def without_terms(x: Any) -> Any:
    """A DTensor whose terms are reduced; its shards stay. Any other value itself."""
    if not isinstance(x, DTensor) or x._layout.dual is x._layout:
        return x
    return x.redistribute(placements=x._layout.dual.shown)


def passing_terms(spec: Spec, plan: CallPlan, inplace: bool = False) -> tuple[Path, ...]:
    """The operands whose terms the results consist of; those of a written tensor have its dtype already.

    A view has the numbers of its tensor, and of a user's list of placements the user says that it is right.
    """
    if spec.is_view or spec.acceptable or all(out.dual is out for out in plan.outs):
        return ()
    read = [o for i, o in enumerate(plan.operands) if i not in spec.unread and (i or not inplace)]
    return tuple(o.path for o in read if any(map(_are_terms, o.src.placements, o.dst.placements)))


def _are_terms(before: Any, after: Any) -> bool:
    return isinstance(before, Partial) and isinstance(after, Partial)


def keep_terms(layout: Layout, dtype: torch.dtype, made: Iterable[torch.dtype]) -> bool:
    """Whether terms of this dtype may be converted to those of the results before they are reduced."""
    if all(each is dtype for each in made):
        return True
    ops = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    return ops <= {"sum", "avg"} and all(_holds(each, dtype) for each in made)


@functools.cache
def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether all numbers of a floating dtype, or their real parts, are numbers of another one.

    Not of integers: their sums wrap around, and those of converted terms do not.
    """
    if not all(t.is_floating_point or t.is_complex for t in (wide, narrow)):
        return False
    w, n = torch.finfo(wide), torch.finfo(narrow)
    return w.eps <= n.eps and w.max >= n.max and w.smallest_normal * w.eps <= n.smallest_normal * n.eps


def checking_terms(route: Route, paths: Sequence[Path]) -> Route:
    """`route`, or, where its results cannot hold the terms, the function of operands without terms."""

    places = tuple(path[0] for path in paths if len(path) == 1 and type(path[0]) is int)
    if len(places) < len(paths):
        places = ()

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        result = route(func, args, loc, kw, kwargs)
        if places and type(result) is DTensor:  # the most common case, of one dtype, without further calls
            made = result._local.dtype
            for i in places:
                if args[i]._local.dtype is not made:
                    break
            else:
                return result
        return result if are_kept(result, paths, args, kwargs) else reduced_first(func, paths, args, kwargs)

    return run


def are_kept(result: Any, paths: Sequence[Path], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the dtypes of the results hold the terms of the operands at `paths`."""
    made: list[torch.dtype] = []
    if type(result) is DTensor:
        made.append(result._local.dtype)
    else:
        map_tensors(result, lambda t: made.append(t.dtype))
    operands = [get_at(args, kwargs, path) for path in paths]
    return all(keep_terms(x._layout, x._local.dtype, made) for x in operands)


def checking_terms_in_place(route: Route, paths: Sequence[Path]) -> Route:
    """The same for a function that writes its first argument, whose dtype is known before."""

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        kept = are_kept(args[0], paths, args, kwargs)
        return route(func, args, loc, kw, kwargs) if kept else reduced_first(func, paths, args, kwargs)

    return run


def reduced_first(func: Any, paths: Sequence[Path], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func` returns for the operands at `paths` with their terms reduced."""
    args, kwargs = list(args), dict(kwargs)
    for path in paths:
        put_at(args, kwargs, path, without_terms(get_at(args, kwargs, path)))
    return func(*args, **kwargs)
