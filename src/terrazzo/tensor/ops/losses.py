"""Losses: sharded over samples; a mean is a sum of terms that are divided by the global count or weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.tensor.dispatch.shapes import dims_within
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.dispatch.structure import on_one_element
from terrazzo.tensor.ops.accumulate import sums_in_single, working_type
from terrazzo.tensor.ops.forms import place_of
from terrazzo.tensor.ops.questions import check_bounds
from terrazzo.tensor.ops.table import rule

F = torch.nn.functional
_IGNORED = -100  # in the local targets: a sample that does not count here
REDUCTIONS = ("none", "mean", "sum")


@rule("nll_loss")
def nll_loss(
    call: Call, input: Operand, target: Operand, weight: Operand | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: Any = "mean",
) -> Spec | None:  # fmt: skip
    """Sharded over samples or classes: a rank that does not hold a sample's target class gives zero for it."""
    if input.ndim < 2 or tuple(target.shape) != (input.shape[0], *input.shape[2:]):
        return None
    if size_average is not None or reduce is not None or reduction not in REDUCTIONS:
        return None
    classes, samples = 1, (0, *range(2, input.ndim))
    ins: dict[int, Dims] = {id(input): tuple(range(input.ndim)), id(target): samples}
    if weight is not None:
        ins[id(weight)] = (classes,)

    def local(chosen: Chosen) -> LocalFunction:
        return _local_nll(chosen, samples, ignore_index, reduction, call.operands.index(input))

    def localize(chosen: Chosen) -> LocalFunction | None:
        cut = [f for f in range(input.ndim) if f in chosen.sharded]
        return None if not cut or (cut == [0] and reduction == "none") else local(chosen)

    scalar = reduction != "none"
    return Spec(
        [ins[id(o)] for o in call.operands],
        [() if scalar else samples],
        [() if scalar else tuple(target.shape)],
        reduce=dict.fromkeys(range(input.ndim), "sum") if scalar else {classes: "sum"},
        localize=localize,
        # Without a reduction, one rank has a sample's loss and the others have zeros.
        joined=(lambda chosen: sums_in_single(local(chosen))(chosen)) if scalar else None,
    )


def _local_nll(chosen: Chosen, samples: Sequence[int], ignore_index: int, reduction: str, at: int) -> LocalFunction:
    """The loss of this rank's samples and classes; sums of half types are accumulated in float32."""
    layout = chosen.ins[at]
    first, count, classes = layout.box().offsets[1], layout.box().lengths[1], layout.shape[1]
    mesh_dims = tuple(sorted({m for f in (*samples, 1) for m in chosen.sharded.get(f, ())}))
    mesh = chosen.outs[0].mesh

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        named = dict(zip(("input", "target", "weight"), loc, strict=False)) | kw
        x, wanted, weight = named["input"], indices(named["target"]), named.get("weight")
        check_bounds(wanted.masked_fill(wanted == ignore_index, 0), classes, "target")
        mine = (wanted >= first) & (wanted < first + count) & (wanted != ignore_index)
        local = torch.where(mine, wanted - first, _IGNORED)
        work = working_type(x.dtype)
        if count == 0:
            # One more class, which is no sample's target: all ranks need the same graph, because the gradient of the
            # gradient communicates.
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))
            weight = weight if weight is None else F.pad(weight, (0, 1))
        if reduction != "none" and work is x.dtype:
            loss = F.nll_loss(x, local, weight, ignore_index=_IGNORED, reduction="sum")
        else:
            loss = F.nll_loss(x, local, weight, ignore_index=_IGNORED, reduction="none")
            loss = loss if reduction == "none" else loss.sum(dtype=work)
        if reduction != "mean":
            return loss
        return loss / all_reduce(total_weight(local, mine, weight, work), axis_of(mesh, mesh_dims))

    return run


def total_weight(target: Any, counts: Any, weight: Any, dtype: torch.dtype) -> Any:
    """The total weight of those class indices that count, by which a mean is divided."""
    if weight is None:
        return counts.sum().to(dtype)
    return (weight.detach()[target.masked_fill(~counts, 0)] * counts).sum(dtype=dtype)


def indices(target: Any) -> Any:
    """Class indices to compute with: in uint8, which PyTorch takes, too, differences wrap and an index is a mask."""
    return target.long() if target.dtype is torch.uint8 else target


_ELEMENTWISE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    "binary_cross_entropy_with_logits",
)
_WEIGHTED = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@rule(*_ELEMENTWISE, any_number=True)
def elementwise_loss(call: Call, input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Every dim may be sharded."""
    if tuple(input.shape) != tuple(target.shape):
        return None
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return None
    at = place_of("reduction", call.func, call.args, call.kwargs)
    given = kwargs.get("reduction", "mean") if at is None else call.args[at]
    reduction = REDUCTIONS[given] if type(given) is int and 0 <= given < 3 else given
    if reduction not in REDUCTIONS or (len(call.operands) > 2 and call.name not in _WEIGHTED):
        return None
    shape = tuple(input.shape)
    ins = [dims for o in call.operands if (dims := dims_within(o.shape, shape)) is not None]
    if len(ins) < len(call.operands):
        return None
    factors, count = tuple(range(input.ndim)), math.prod(shape)

    def reduced(func: Any, loc: list[Any], kw: dict[str, Any], wanted: str) -> torch.Tensor:
        if at is not None:
            wanted_here = wanted if isinstance(given, str) else REDUCTIONS.index(wanted)
            loc = [*loc[:at], wanted_here, *loc[at + 1 :]]
        else:
            kw = kw | {"reduction": wanted}
        return func(*loc, **kw)

    def localize(chosen: Chosen) -> LocalFunction | None:
        if reduction != "mean" or not chosen.sharded:
            return None

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            total = reduced(func, loc, kw, "sum")
            if not total.is_floating_point():
                on_one_element(func, loc, kw)  # raises: there are sums of integers, but no means
            return total / count

        return run

    def in_single(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        total = reduced(func, loc, kw, "none").sum(dtype=torch.float32)
        return total / count if reduction == "mean" else total

    scalar = reduction != "none"
    return Spec(
        ins,
        [() if scalar else factors],
        [() if scalar else shape],
        reduce=dict.fromkeys(factors, "sum") if scalar else {},
        localize=localize,
        joined=sums_in_single(in_single) if scalar else None,
    )
