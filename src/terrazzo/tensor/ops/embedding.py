"""Embeddings. Ranks that share a vocabulary look up their own rows and return zeros for the others: partial terms."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket
from terrazzo.tensor.dispatch.spec import Call, Chosen, LocalFunction, Operand, Spec
from terrazzo.tensor.ops.questions import check_bounds
from terrazzo.tensor.ops.table import decomposition, rule

F = torch.nn.functional


@rule("embedding")
def embedding(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    """`F.embedding(input, weight, ...)` and `aten.embedding(weight, indices, ...)` take the two in different order."""
    given = _named(call, args, kwargs)
    weight, indices = given["weight"], given["indices"]
    if not isinstance(weight, Operand) or not isinstance(indices, Operand) or weight.ndim != 2:
        return None
    if given.get("max_norm") is not None:
        return None  # max_norm renormalises the weight in place
    ids = tuple(range(indices.ndim))
    row, column = indices.ndim, indices.ndim + 1
    by_operand = {id(weight): (row, column), id(indices): ids}
    pad = given.get("padding_idx")
    if pad is not None and pad < 0:
        pad = pad + weight.shape[0] if given["counts_back"] else None
    by_frequency = bool(given.get("scale_grad_by_freq"))

    def localize(chosen: Chosen) -> LocalFunction | None:
        if row not in chosen.sharded:
            return None
        box = chosen.ins[call.operands.index(weight)].box()
        return _rows_of(weight.shape[0], box.offsets[0], box.lengths[0], pad, weight.path[0], indices.path[0])

    return Spec(
        [by_operand[id(o)] for o in call.operands],
        [(*ids, column)],
        [(*indices.shape, weight.shape[1])],
        reduce={row: "sum"},
        # Counting how often a word occurs needs all indices on one rank.
        whole=frozenset((*ids, row)) if by_frequency else frozenset(),
        localize=localize,
    )


def _named(call: Call, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    if isinstance(call.func, OpOverload | OpOverloadPacket) or call.func is torch.embedding:
        names: tuple[str, ...] = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
        return {"counts_back": False} | dict(zip(names, args, strict=False)) | dict(kwargs)
    names = ("indices", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    renamed = {("indices" if k == "input" else k): v for k, v in kwargs.items()}
    return {"counts_back": True} | dict(zip(names, args, strict=False)) | renamed


def _rows_of(total: int, first: int, count: int, pad: int | None, weight_at: Any, indices_at: Any) -> LocalFunction:
    """The lookup in rows `first` to `first + count` of `total`."""
    own_pad = pad - first if pad is not None and first <= pad < first + count else None

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        table = loc[weight_at] if isinstance(weight_at, int) else kw[weight_at]
        wanted = loc[indices_at] if isinstance(indices_at, int) else kw[indices_at]
        check_bounds(wanted, total, "index")
        mine = wanted - first
        here = (mine >= 0) & (mine < count)
        if count == 0:
            table = F.pad(table, (0, 0, 0, 1))  # a row that no index asks for
        rows = F.embedding(mine.masked_fill(~here, 0), table, own_pad)
        return rows.masked_fill(~here.unsqueeze(-1), 0)

    return run


@decomposition("embedding_bag")
def embedding_bag(
    input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: Any = None, sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: Any = None,
) -> Any:  # fmt: skip
    """Bags of one size (a matrix of indices) are a lookup and a sum; for others the operands are gathered."""
    # The C++ function takes the mode as a number, at another position.
    if (
        not isinstance(mode, str)
        or mode not in ("sum", "mean")
        or offsets is not None
        or max_norm is not None
        or input.ndim != 2
    ):
        return NotImplemented
    if input.shape[1] == 0 or (mode == "mean" and per_sample_weights is not None):
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    counts = input != (padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx)
    total = (rows * counts.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)
