"""Gather, scatter and selection by index tensors, dim by dim, and embeddings.

Ranks that share a vocabulary look up their own rows and return zeros for the others: partial terms.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec, Static, within
from terrazzo.tensor.ops.questions import check_bounds
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


@rule("gather")
def gather(call: Call, input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Spec | None:
    if input.ndim != index.ndim or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    along = input.ndim
    # Other dims of the index may be shorter than the input's; only dims of equal size are one loop.
    same: Dims = tuple(i if i != d and input.shape[i] == index.shape[i] else None for i in range(input.ndim))
    out = tuple(along if i == d else f for i, f in enumerate(same))
    return Spec([same, out], [out], [index.shape])


@rule("index_select")
def index_select(call: Call, input: Operand, dim: int, index: Operand) -> Spec | None:
    if not input.ndim or index.ndim != 1:
        return None
    d = norm_dim(dim, input.ndim)
    along = input.ndim
    ins: Dims = tuple(None if i == d else i for i in range(input.ndim))
    out = tuple(along if i == d else i for i in range(input.ndim))
    shape = tuple(index.shape[0] if i == d else n for i, n in enumerate(input.shape))
    return Spec([ins, (along,)], [out], [shape], linear=[(0,)])


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(
    call: Call, input: Operand, dim: int, index: Operand, src: Any = None, *rest: Any, **kwargs: Any
) -> Spec | None:
    """Dims other than `dim` may be sharded where all operands have the same size.

    Where values are added, `dim` may be sharded, too, and each rank's part gives a term.
    """
    if input.ndim != index.ndim or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    given = [o for o in call.operands[1:] if o is not index]
    values = given[0] if given else None  # `src`, or `value=`, a number or a 0-d tensor
    if len(given) > 1 or (values is not None and values.ndim not in (0, input.ndim)):
        return None
    tensors = [input, index] + ([values] if values is not None and values.ndim else [])
    same: Dims = tuple(
        i if i != d and all(t.shape[i] == input.shape[i] for t in tensors) else None for i in range(input.ndim)
    )
    ins = [same if o.ndim else () for o in call.operands]
    adds = call.name == "scatter_add" and len(call.operands) == 3 and values is call.operands[2]
    if not adds or values is None or values.shape[d] != index.shape[d]:
        return Spec(ins, [same], [input.shape], linear=[(0, 2)] if adds else [])
    along = input.ndim
    added: Dims = tuple(along if i == d else f for i, f in enumerate(same))
    return Spec(
        [same, added, added],
        [same],
        [input.shape],
        reduce={along: "sum"},
        linear=[(0, 2)],
        addends=frozenset((0,)),
    )


@rule("index_add", "index_copy")
def index_add(
    call: Call, input: Operand, dim: int, index: Operand, source: Operand, *, alpha: Static = 1, out: Static = None
) -> Spec | None:
    if not input.ndim or source.ndim != input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    if any(n != m for i, (n, m) in enumerate(zip(source.shape, input.shape, strict=True)) if i != d):
        return None
    dims: Dims = tuple(None if i == d else i for i in range(input.ndim))
    if call.name == "index_copy" or index.ndim != 1 or index.shape[0] != source.shape[d]:
        return Spec([dims, (None,) * index.ndim, dims], [dims], [input.shape], linear=[(0, 2)])
    along = input.ndim
    added: Dims = tuple(along if i == d else i for i in range(input.ndim))
    return Spec(
        [dims, (along,), added],
        [dims],
        [input.shape],
        reduce={along: "sum"},
        linear=[(0, 2)],
        addends=frozenset((0,)),
    )


@rule("index_fill")
def index_fill(call: Call, input: Operand, dim: int, index: Operand, value: Any) -> Spec | None:
    if not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    dims: Dims = tuple(None if i == d else i for i in range(input.ndim))
    ins = [dims if o is input else (None,) * o.ndim for o in call.operands]
    return Spec(ins, [dims], [input.shape])


@rule("tril", "triu")
def triangle(call: Call, input: Operand, diagonal: int = 0) -> Spec | None:
    if input.ndim < 2:
        return None
    return within(input, (input.ndim - 2, input.ndim - 1), linear=[(0,)])


@rule("one_hot")
def one_hot(call: Call, input: Operand, num_classes: int = -1) -> Spec | None:
    if num_classes <= 0:
        return None
    factors = tuple(range(input.ndim))
    return Spec([factors], [(*factors, None)], [(*input.shape, num_classes)])


# ------------------------------------------------------------------ embeddings


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
