"""Whether a plan's local function accepts the empty shards that some rank will pass to it.

Many functions refuse tensors without elements. The rank with an empty shard would raise, while the others would go on
and wait for it. So when the plan is made every rank tests the same thing: do the function and its gradient work on the
shapes of the rank with the empty shard?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from terrazzo.layout import coordinates_of_all_shapes, leaves_a_rank_empty
from terrazzo.tensor.dispatch.planner import CallPlan
from terrazzo.tensor.dispatch.spec import Spec
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, on_stand_ins


def takes_empty_shards(
    spec: Spec, plan: CallPlan, func: Any, loc: Sequence[Any], kw: Mapping[str, Any], inplace: bool = False
) -> bool:
    """True when no rank has an empty shard under the plan, or when the caller's function works on one.

    A rule that replaces the local function is responsible for empty shards itself.
    """
    layouts = [o.dst for o in plan.operands]
    # `localize` may return None on some ranks; whether the rule has one is the same on all ranks.
    if spec.localize is not None or spec.never_empty or not any(leaves_a_rank_empty(layout) for layout in layouts):
        return True
    tried: set[tuple[tuple[int, ...], ...]] = set()
    for at in coordinates_of_all_shapes([*layouts, *plan.outs]):
        shapes = tuple(layout.lengths(at) for layout in layouts)
        if shapes not in tried and not all(prod(s) or not prod(o.shape) for s, o in zip(shapes, layouts, strict=True)):
            tried.add(shapes)
            promised = [tuple(out.lengths(at)) for out in plan.outs]
            if not _works(plan, func, loc, kw, shapes, promised, inplace):
                return False
    return True


def _works(
    plan: CallPlan,
    func: Any,
    loc: Sequence[Any],
    kw: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    promised: Sequence[tuple[int, ...]],
    inplace: bool,
) -> bool:
    probes: list[torch.Tensor] = []
    for o, shape in zip(plan.operands, shapes, strict=True):
        local = get_at(loc, kw, o.path)
        written = inplace and o.path == (0,)
        # Tensors with elements are expanded from one element, except those that are written to.
        probe = local.new_zeros(shape) if written else local.new_zeros(()).expand(shape)
        differentiable = not written and (local.is_floating_point() or local.is_complex())
        probes.append(probe.requires_grad_(differentiable))
    try:
        with torch.enable_grad():
            result = on_stand_ins(func, loc, kw, [o.path for o in plan.operands], probes)
            outs: list[torch.Tensor] = []
            map_tensors(result, outs.append)
            if [tuple(t.shape) for t in outs] != list(promised):
                return False
            wanted = [t for t in outs if t.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.zeros_like(t) for t in wanted])
                # If an input gets no gradient here, its backward does not run, while the other ranks' backward
                # communicates and would wait for this rank.
                return all(t.grad is not None for t in probes if t.requires_grad and t.is_leaf)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True
