"""Gather, scatter and selection by index tensors, dim by dim."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec, within
from terrazzo.tensor.ops.table import rule
from terrazzo.tensor.ops.views import norm_dim


@rule("gather")
def gather(call: Call, input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Spec | None:
    if not isinstance(index, Operand) or not isinstance(dim, int) or input.ndim != index.ndim or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    along = input.ndim
    # Other dims of the index may be shorter than the input's; only dims of equal size are one loop.
    same: Dims = tuple(i if i != d and input.shape[i] == index.shape[i] else None for i in range(input.ndim))
    out = tuple(along if i == d else f for i, f in enumerate(same))
    return Spec([same, out], [out], [index.shape])


@rule("index_select")
def index_select(call: Call, input: Operand, dim: int, index: Operand) -> Spec | None:
    if not isinstance(index, Operand) or not isinstance(dim, int) or not input.ndim or index.ndim != 1:
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
    if not isinstance(index, Operand) or not isinstance(dim, int) or input.ndim != index.ndim or not input.ndim:
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
    call: Call, input: Operand, dim: int, index: Operand, source: Operand, *, alpha: Any = 1, out: Any = None
) -> Spec | None:
    if not isinstance(index, Operand) or not isinstance(source, Operand) or not isinstance(dim, int):
        return None
    if not input.ndim or source.ndim != input.ndim or len(call.operands) != 3 or isinstance(alpha, Operand):
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
    if not isinstance(index, Operand) or not isinstance(dim, int) or not input.ndim:
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
