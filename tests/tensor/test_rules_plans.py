"""The rules as text: for given placements, what the operands are brought to and what the result has.

Plans are made from shapes and placements alone, so no ranks are needed. `S1 8,6` is a tensor of shape (8, 6) sharded
along dim 1; on two mesh dims it is `S0.P 8,6`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo.tensor  # noqa: F401  (registers the rules)
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.planner import CallPlan, make_plan
from terrazzo.tensor.dispatch.spec import Call, Operand
from terrazzo.tensor.ops.table import apply_rule


@dataclass(frozen=True)
class Mesh:
    """All that a layout asks of a mesh."""

    shape: tuple[int, ...]

    def get_coordinate(self) -> list[int]:
        return [0] * len(self.shape)


LINE, SQUARE = Mesh((4,)), Mesh((2, 2))


def placement(text: str) -> Placement:
    kinds: dict[str, Placement] = {"R": Replicate(), "P": Partial(), "A": Partial("avg"), "M": Partial("max")}
    return kinds[text] if text in kinds else Shard(int(text[1:]))


def text_of(layout: Layout) -> str:
    short = {"R": "R", "P(sum)": "P", "P(avg)": "A", "P(max)": "M", "P(min)": "MIN", "P(product)": "PROD"}
    return ".".join(short.get(str(p), f"S{getattr(p, 'dim', '')}") for p in layout.placements)


def operand(text: str, path: tuple[Any, ...]) -> Operand:
    placed, _, sizes = text.partition(" ")
    marks = placed.split(".")
    shape = tuple(int(n) for n in sizes.split(",")) if sizes else ()
    mesh = LINE if len(marks) == 1 else SQUARE
    return Operand(Layout.of(mesh, [placement(m) for m in marks], shape), path)


def plan_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> CallPlan | None:
    operands: list[Operand] = []

    def made(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, str) and value[0] in "RPAMS" and (len(value) == 1 or value[1] in "0123456789. "):
            operands.append(operand(value, path))
            return operands[-1]
        return [made(v, (*path, i)) for i, v in enumerate(value)] if isinstance(value, list) else value

    made_args = tuple(made(a, (i,)) for i, a in enumerate(args))
    made_kwargs = {k: made(v, (k,)) for k, v in (kwargs or {}).items()}
    name, inplace = canonical_name(func)
    call = Call(name, func, made_args, made_kwargs, operands, inplace)
    spec = apply_rule(call)
    return None if spec is None else make_plan(call, spec)


def planned(func: Any, *args: Any, **kwargs: Any) -> str:
    plan = plan_of(func, args, kwargs)
    if plan is None:
        return "no rule"
    ins = " ".join(text_of(o.dst) + ("'" * bool(o.cast)) for o in plan.operands)
    return f"{ins} -> {' '.join(text_of(o) for o in plan.outs)}"


# A quote after an operand: its gradient is summed over the ranks, because they use it differently.


def says(expected: str, func: Any, *args: Any, **kwargs: Any) -> Any:
    return pytest.param(expected, func, args, kwargs, id=f"{canonical_name(func)[0]}: {expected}")


PRODUCTS = [
    says("S0 R' -> S0", torch.mm, "S0 8,6", "R 6,4"),
    says("R' S1 -> S1", torch.mm, "R 8,6", "S1 6,4"),
    says("S1 S0 -> P", torch.mm, "S1 8,6", "S0 6,4"),
    says("S1 S0 -> P", torch.mm, "S1 8,6", "R 6,4"),
    says("P R' -> P", torch.mm, "P 8,6", "R 6,4"),
    says("S0.R' R.S1' -> S0.S1", torch.mm, "S0.R 8,6", "R.S1 6,4"),
    says("S0.S1 R.S0' -> S0.P", torch.mm, "S0.S1 8,6", "R.S0 6,4"),
    says("S1 S1 P -> P", F.linear, "S1 8,6", "S1 4,6", "R 4"),
    says("S0 R' R' -> S0", F.linear, "S0 8,6", "R 4,6", "R 4"),
    says("R' S0 S0 -> S1", F.linear, "R 8,6", "S0 4,6", "S0 4"),
    says("S0 S0 -> S0", torch.bmm, "S0 8,6,2", "S0 8,2,3"),
    # Terms of a large result cost more than gathering the weight, those of a small one less.
    says("S0 R -> S0", torch.mm, "S0 8,4", "S0 4,16"),
    says("S1 S0 -> P", torch.mm, "S0 4,64", "S0 64,4"),
    says("S1 S1 -> P", F.linear, "S0 4,64", "S1 4,64"),
    # What lies on the contracted loop stays there, however large the result: row-parallel layers, gradients of weights.
    says("S1 S0 -> P", torch.mm, "S1 64,4", "S0 4,64"),
    says("S1 S1 P -> P", F.linear, "S1 64,4", "S1 64,4", "R 64"),
    says("S1 S1 P -> P", F.linear, "S1 64,4", "S1 64,4", "S0 64"),
    # Terms that came are reduced where they are smaller: before the product or after it.
    says("P R' -> P", torch.mm, "P 8,64", "R 64,4"),
    says("R R -> R", torch.mm, "P 8,4", "R 4,64"),
    # A mesh dim counts what the others leave of a tensor.
    says("S0.R' R.S1 -> S0.S1", torch.mm, "S0.R 8,64", "S0.S1 64,8"),
    # Cutting a dim outside the mesh dim that cuts it already would move all of it.
    says("R.S1 R.S0 -> R.S1", torch.add, "R.S1 16,16", "S0.S0 16"),
    says("S0 R' -> S0", torch.matmul, "S0 8,5,6", "R 6,4"),
]

POINTWISE = [
    says("S0 S0 -> S0", torch.add, "S0 8,6", "S0 8,6"),
    says("S1 S0 -> S1", torch.add, "S1 8,6", "S0 6"),
    says("S0 R' -> S0", torch.add, "S0 8,6", "R 6"),
    says("P P -> P", torch.add, "P 8,6", "P 8,6"),
    says("P R' -> P", torch.mul, "P 8,6", "R 8,6"),
    says("P -> P", torch.mul, "P 8,6", 2.0),
    says("P -> P", torch.div, "P 8,6", 2.0),
    says("P -> P", torch.neg, "P 8,6"),
    says("A -> A", torch.neg, "A 8,6"),
    # What is not linear must not see terms: a number added to each rank's term would be added four times.
    says("R -> R", torch.add, "P 8,6", 2.0),
    says("R -> R", torch.sub, "P 8,6", 2.0),
    says("R -> R", torch.div, 2.0, "P 8,6"),
    says("R -> R", torch.relu, "P 8,6"),
    says("R -> R", torch.abs, "P 8,6"),
    says("R -> R", torch.pow, "P 8,6", 2),
    says("P R' -> P", torch.mul, "P 8,6", "P 8,6"),
    says("R R -> R", torch.maximum, "P 8,6", "P 8,6"),
    says("P -> P", torch.Tensor.long, "P 8,6"),  # unless the dtypes, which plans do not know, are different
    says("R -> R", torch.neg, "M 8,6"),
]

REDUCTIONS = [
    says("S0 -> P", torch.sum, "S0 8,6"),
    says("S0 -> S0", torch.sum, "S0 8,6", 1),
    says("S1 -> P", torch.mean, "S1 8,6", 1),
    says("P -> P", torch.sum, "P 8,6"),
    says("S0 -> M", torch.amax, "S0 8,6", 0),
    says("S0 -> MIN", torch.min, "S0 8,6"),
    says("S0 -> PROD", torch.prod, "S0 8,6"),
    says("S0 -> M", torch.any, "S0 8,6"),
    says("R -> R", torch.amax, "P 8,6"),
    says("S0 -> S0", torch.softmax, "S0 8,6", -1),
    says("no rule", torch.softmax, "S1 8,6", -1),  # decomposed: two numbers a row are exchanged
    says("no rule", torch.logsumexp, "S1 8,6", 1),
    says("S0 -> S0", torch.cumsum, "S0 8,6", 1),
    says("S0 -> S0 S0", torch.topk, "S0 8,6", 2),
    says("S0 -> S0 S0", torch.sort, "S0 8,6"),
]

VIEWS = [
    says("S0 -> S0", torch.Tensor.view, "S0 8,6", 8, 2, 3),
    says("S1 -> S1", torch.Tensor.view, "S1 2,8", 2, 4, 2),
    says("R -> R", torch.Tensor.view, "S1 4,6", 24),
    says("S0 -> S0", torch.Tensor.view, "S0 4,6", 24),
    says("S0 -> S1", torch.t, "S0 8,6"),
    says("P -> P", torch.t, "P 8,6"),
    says("M -> M", torch.t, "M 8,6"),
    says("S0 -> S1", torch.unsqueeze, "S0 8,6", 0),
    says("S0 S0 -> S0", torch.cat, ["S0 8,6", "S0 8,4"], 1),
    says("S1 -> S1 S1", torch.split, "S1 8,6", 4),
    says("S0 -> S0", torch.Tensor.unfold, "S0 8,6", 1, 2, 2),
]

LAYERS = [
    says("S0 R' R' -> S0", F.layer_norm, "S0 8,6", (6,), "R 6", "R 6"),
    says("S0 R' R' -> S0", F.group_norm, "S0 8,4,5", 2, "R 4", "R 4"),
    says("S1.R S0.R S0.R -> S1.R", F.group_norm, "S1.R 8,4,5", 2, "R.R 4", "R.R 4"),
    says("R R -> R", F.embedding, "R 5", "R 8,6"),
    says("S0 R' -> S0", F.embedding, "S0 5", "R 8,6"),
    says("R' S0 -> P", F.embedding, "R 5", "S0 8,6"),
    says("R' S1 -> S1", F.embedding, "R 5", "S1 8,6"),
    says("S0 R' R' -> S0", torch.conv2d, "S0 8,4,6,6", "R 8,4,3,3", "R 8"),
    says("R' S0 S0 -> S1", torch.conv2d, "R 8,4,6,6", "S0 8,4,3,3", "S0 8"),
    says("S1 S1 P -> P", torch.conv2d, "S1 8,4,6,6", "S1 8,4,3,3", "R 8"),
    says("S1 S0 S0 -> S1", torch.conv2d, "S1 8,4,6,6", "S0 8,1,3,3", "S0 8", 1, 0, 1, 4),
    says("S0 R' -> S0", torch.conv_transpose2d, "S0 8,4,6,6", "R 4,8,3,3"),
    says("S0 -> S0", F.avg_pool2d, "S0 8,4,6,6", 2),
    says("S1 -> S1", F.max_pool2d, "S1 8,4,6,6", 2),
    says("P -> P", F.avg_pool2d, "P 8,4,6,6", 2),
    says("R -> R", F.max_pool2d, "P 8,4,6,6", 2),
    says("S0 S0 S0 -> S0", F.scaled_dot_product_attention, *["S0 8,4,5,6"] * 3),
    says("S1 S1 S1 -> S1", F.scaled_dot_product_attention, *["S1 8,4,5,6"] * 3),
    says("S2 R' R' -> S2", F.scaled_dot_product_attention, "S2 8,4,8,6", "R 8,4,5,6", "R 8,4,5,6"),
    says("S1 S1 S1 -> S1", F.scaled_dot_product_attention, "S1 2,8,5,6", *["S1 2,4,5,6"] * 2, enable_gqa=True),
]

LOSSES = [
    says("S0 S0 -> P", F.nll_loss, "S0 8,6", "S0 8", reduction="sum"),
    says("S0 S0 -> S0", F.nll_loss, "S0 8,6", "S0 8", reduction="none"),
    says("S1 R' -> P", F.nll_loss, "S1 8,6", "R 8", reduction="none"),
    says("S0 S0 -> P", F.mse_loss, "S0 8,6", "S0 8,6"),
    says("R R -> R", F.mse_loss, "P 8,6", "R 8,6"),
    says("S0 S0 -> P", F.binary_cross_entropy_with_logits, "S0 8,6", "S0 8,6"),
]

SCATTERING = [
    says("S1 S1 -> S1", torch.gather, "S1 8,6", 0, "S1 3,6"),
    says("R R -> R", torch.gather, "S0 8,6", 0, "R 3,6"),
    says("S1 R' -> S1", torch.index_select, "S1 8,6", 0, "R 3"),
    says("S1 S1 S1 -> S1", torch.scatter_add, "S1 8,6", 0, "S1 3,6", "S1 3,6"),
    says("P R' P -> P", torch.index_add, "P 8,6", 0, "R 3", "P 3,6"),
]


@pytest.mark.parametrize(
    ("expected", "func", "args", "kwargs"),
    [*PRODUCTS, *POINTWISE, *REDUCTIONS, *VIEWS, *LAYERS, *LOSSES, *SCATTERING],
)
def test_plans(expected, func, args, kwargs):
    assert planned(func, *args, **kwargs) == expected


def test_functions_that_are_equal_have_one_name():
    """Names are cached by function: torch.dsmm == torch.mm, and who comes first must not decide."""
    names: dict[Any, set[tuple[str, bool]]] = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            names.setdefault(function, set()).add(canonical_name.__wrapped__(function))
    assert {function: found for function, found in names.items() if len(found) > 1} == {}
