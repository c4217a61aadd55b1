"""Why an operation on DTensors communicates: the candidates of each mesh dim, with their costs in bytes.

The decisions come from the same functions as when the operation runs (`dispatch.planner.choices`), so what is shown is
what happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.errors import DTensorError
from terrazzo.layout import Placement
from terrazzo.layout.drawing import Shown
from terrazzo.tensor.dispatch.candidates import Candidate, Cost
from terrazzo.tensor.dispatch.empties import takes_empty_shards
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.plain import check_one_mesh, describe
from terrazzo.tensor.dispatch.planner import CallPlan, Choice, choices, make_plan
from terrazzo.tensor.dispatch.spec import HALF, Call, Spec, result_type
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, on_one_element
from terrazzo.tensor.dispatch.terms import keep_terms, passing_terms
from terrazzo.tensor.ops.forms import form_of
from terrazzo.tensor.ops.table import apply_rule, operation

_WITHOUT_PLAN = {
    "rule": "its rule does not cover this call: it is decomposed into operations that are planned one by one, or its "
    "operands are gathered",
    "decomposition": "it is decomposed into other operations, which are planned one by one",
    "handler": "it has a function of its own, without a plan",
    "body": "its own body runs, and each operation in it is planned",
    "replicate": "its operands are gathered, and it runs on every rank",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate: the placements of the operands and of the results, and its cost for one rank, in bytes.

    `receives` is what redistributing the operands takes. `reduces` is what an all-reduce of the resulting terms will
    take later; `counted` says whether it counts. It does not if the operands are already sharded on the loop that is
    summed, because then the call always stays sharded there. `leaves` is what a rank then holds of the results.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    receives: int
    reduces: int
    counted: bool
    leaves: int
    chosen: bool

    @property
    def cost(self) -> int:
        """The bytes that candidates are compared by."""
        return self.receives + self.reduces if self.counted else self.receives

    def __str__(self) -> str:
        return f"{_marks(self.operands)} -> {_marks(self.results)}"


@dataclass(frozen=True, slots=True)
class DimChoice:
    """What one mesh dim chose among its candidates, and why."""

    mesh_dim: int
    ranks: int
    options: tuple[Option, ...]
    reason: str

    @property
    def chosen(self) -> Option | None:
        """The chosen candidate; None if there was none."""
        return next((option for option in self.options if option.chosen), None)

    def __str__(self) -> str:
        rows = [["", "operands -> results", "receives", "reduces later", "leaves on a rank"]]
        for o in self.options:
            later = f"{o.reduces:,}" if o.counted or not o.reduces else f"({o.reduces:,})"
            rows.append(["*" if o.chosen else "", str(o), f"{o.receives:,}", later, f"{o.leaves:,}"])
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [f"mesh dim {self.mesh_dim}, {self.ranks} ranks: {self.reason}"]
        for row in rows:
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  " + "  ".join([row[0].ljust(1), row[1].ljust(widths[1]), *numbers]))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Shown):
    """How a call is planned: the choice of each mesh dim, in order. Print it.

    `note` says what else happens to the call, or why it has no plan; in that case `choices` is empty.
    """

    operation: str
    choices: tuple[DimChoice, ...]
    note: str = ""

    def __str__(self) -> str:
        head = f"{self.operation}: {self.note}" if self.note else f"{self.operation}, in bytes"
        return "\n".join([head, *map(str, self.choices)])


def explain(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What the planner decides for `func(*args, **kwargs)`; nothing is run, moved or changed.

    Every rank gets the same answer. Bytes are computed with the element size of the operands' common dtype.

    >>> import torch
    >>> from terrazzo.tensor import Replicate, Shard, explain, init_device_mesh, ones
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> x = ones(8, 6, device_mesh=mesh, placements=[Shard(0)])
    >>> w = ones(6, 4, device_mesh=mesh, placements=[Replicate()])
    >>> print(explain(torch.mm, x, w))
    mm, in bytes
    mesh dim 0, 1 ranks: as few bytes as any other, and each rank computes least
         operands -> results  receives  reduces later  leaves on a rank
      *  S(0) R -> S(0)              0              0               128
         R R -> R                    0              0               128
    >>> explain(torch.mm, x, w).choices[0].chosen.results
    (Shard(dim=0),)
    """
    call, spec, loc, kw = _described(func, args, kwargs)
    if not call.operands:
        raise DTensorError(f"explain: none of the arguments of {call.name} is a DTensor")
    check_one_mesh(call)
    if spec is None:
        return Explanation(call.name, (), _WITHOUT_PLAN[operation(call.name, call.inplace).how])
    layouts = [o.layout for o in call.operands]
    fixed = layouts[0] if call.inplace else None
    dtypes = [get_at(loc, kw, o.path).dtype for o in call.operands]
    width = functools.reduce(torch.promote_types, dtypes).itemsize
    ranks = layouts[0].mesh_shape
    made = tuple(_dim_choice(choice, ranks[choice.mesh_dim], width) for choice in choices(spec, layouts, fixed))
    return Explanation(call.name, made, _note(call, spec, func, loc, kw))


def _described(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, Spec | None, list[Any], dict[str, Any]]:
    """The call as its rule sees it, the rule's spec, and the arguments with local tensors in place of DTensors."""
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    form = form_of(func, args, kwargs) if kwargs else None
    if form is not None:
        args, kwargs = form.apply(args, kwargs)
    name, inplace = canonical_name(func)
    call, loc, kw = describe(name, inplace, func, args, kwargs)
    spec = apply_rule(call) if call.operands else None
    return call, None if spec is None else spec.for_locals(loc, kw), loc, kw


def _note(call: Call, spec: Spec, func: Any, loc: list[Any], kw: dict[str, Any]) -> str:
    """What else happens to the call, or why the plan is not used."""
    plan = make_plan(call, spec, call.operands[0].layout if call.inplace else None, to_run=False)
    if plan is None:
        return "no candidate keeps the placements of the written tensor: the result is computed and then copied there"
    if call.operands[0].layout.coord is not None and not takes_empty_shards(spec, plan, func, loc, kw, call.inplace):
        return "not run as shown below: some rank would have an empty shard, which the function does not accept"
    if not _holds_terms(call, spec, plan, func, loc, kw):
        return (
            "not run as shown below: the dtype of the result cannot hold the terms of the operands, so these are "
            "reduced first"
        )
    if spec.joined is not None and any(out.dual is not out for out in plan.outs) and result_type(loc, kw) in HALF:
        return "terms of this dtype are reduced at once, in float32; in bytes"
    return ""


def _holds_terms(call: Call, spec: Spec, plan: CallPlan, func: Any, loc: list[Any], kw: dict[str, Any]) -> bool:
    passing = passing_terms(spec, plan, call.inplace)
    if not passing:
        return True
    made: list[torch.dtype] = []
    try:
        map_tensors(loc[0] if call.inplace else on_one_element(func, loc, kw), lambda t: made.append(t.dtype))
    except Exception:
        return True  # the function does not work on one element, so its dtype is not known before it runs
    terms = [(o.src, get_at(loc, kw, o.path).dtype) for o in plan.operands if o.path in passing]
    return all(keep_terms(layout, dtype, made) for layout, dtype in terms)


def _dim_choice(choice: Choice, ranks: int, width: int) -> DimChoice:
    options = tuple(
        Option(
            candidate.ins,
            candidate.outs,
            round(cost.received * width),
            round(cost.terms * width),
            cost.counted,
            round(cost.left * width),
            candidate is choice.best,
        )
        for candidate, cost in choice.options
    )
    return DimChoice(choice.mesh_dim, ranks, options, _reason(choice, width))


def _reason(choice: Choice, width: int) -> str:
    best = next((option for option in choice.options if option[0] is choice.best), None)
    if best is None:
        return "there are no candidates"
    others = [option for option in choice.options if option is not best]
    if not others:
        return "there is no other candidate"
    return _against(best, min(others, key=lambda option: (option[1].total, option[1].left, option[0].rank)), width)


def _against(best: tuple[Candidate, Cost], other: tuple[Candidate, Cost], width: int) -> str:
    (candidate, cost), (runner_up, second) = best, other
    if not cost.counted and cost.terms and candidate.factor is not None:
        return "the operands are sharded on the summed loop already, so the call stays sharded there"
    if cost.total < second.total:
        return f"fewest bytes, {round(cost.total * width):,} against {round(second.total * width):,}"
    if cost.left < second.left:
        return "as few bytes as any other, and less is left on each rank"
    if candidate.rank < runner_up.rank:
        return "as few bytes as any other, and each rank computes least"
    return "as few bytes as any other, and listed first"


def _marks(placements: tuple[Placement, ...]) -> str:
    return " ".join(map(str, placements))
