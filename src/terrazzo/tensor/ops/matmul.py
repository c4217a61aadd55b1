"""Matrix products: contractions of operands over shared loops, linear in each operand."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import HALF, Call, Dims, Operand, Spec, result_type
from terrazzo.tensor.ops.accumulate import product_type
from terrazzo.tensor.ops.pointwise import broadcast
from terrazzo.tensor.ops.table import rule


def contraction(ins: list[Dims], out: Dims, operands: list[Operand]) -> Spec:
    """The spec of an einsum: loops that the output does not have are summed."""
    sizes = {
        f: n for dims, o in zip(ins, operands, strict=True) for f, n in zip(dims, o.shape, strict=True) if f is not None
    }
    summed = {f: "sum" for f in sizes if f not in out}
    shape = tuple(1 if f is None else sizes[f] for f in out)
    return Spec(ins, [out], [shape], reduce=summed, linear=[(i,) for i in range(len(ins))])


def _in_range(spec: Spec, operands: list[Operand]) -> Spec:
    """The spec of a product; terms of a half type are reduced before it.

    Terms may be much larger than their sum, so that a product of them could overflow float16.
    """
    if all(o.layout.dual is o.layout for o in operands):
        return spec
    return replace(spec, guard=_is_wide, otherwise=replace(spec, linear=[]))


def _product(ins: list[Dims], out: Dims, operands: list[Operand]) -> Spec:
    return _in_range(contraction(ins, out, operands), operands)


def _is_wide(loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
    dtype = result_type(loc, kw)
    assert dtype is not None
    device = next(v.device for v in (*loc, *kw.values()) if isinstance(v, torch.Tensor))
    return product_type(dtype, device) not in HALF


@rule("mm")
def mm(call: Call, input: Operand, mat2: Operand) -> Spec | None:
    if input.ndim != 2 or mat2.ndim != 2 or input.shape[1] != mat2.shape[0]:
        return None
    return _product([(0, 1), (1, 2)], (0, 2), [input, mat2])


@rule("bmm")
def bmm(call: Call, input: Operand, mat2: Operand) -> Spec | None:
    if input.ndim != 3 or mat2.ndim != 3 or input.shape[0] != mat2.shape[0] or input.shape[2] != mat2.shape[1]:
        return None
    return _product([(3, 0, 1), (3, 1, 2)], (3, 0, 2), [input, mat2])


@rule("mv")
def mv(call: Call, input: Operand, vec: Operand) -> Spec | None:
    if input.ndim != 2 or vec.ndim != 1 or input.shape[1] != vec.shape[0]:
        return None
    return _product([(0, 1), (1,)], (0,), [input, vec])


@rule("dot", "inner_1d", "vdot")
def dot(call: Call, input: Operand, other: Operand) -> Spec | None:
    if input.ndim != 1 or input.shape != other.shape:
        return None
    return _product([(0,), (0,)], (), [input, other])


@rule("outer", "ger")
def outer(call: Call, input: Operand, vec2: Operand) -> Spec | None:
    if input.ndim != 1 or vec2.ndim != 1:
        return None
    return _product([(0,), (1,)], (0, 1), [input, vec2])


@rule("matmul")
def matmul(call: Call, input: Operand, other: Operand) -> Spec | None:
    if not isinstance(input, Operand) or not isinstance(other, Operand) or not input.ndim or not other.ndim:
        return None
    a, b = input.shape, other.shape
    if a[-1] != (b[-2] if len(b) > 1 else b[-1]):
        return None
    try:
        batch, batch_dims = broadcast([a[:-2], b[:-2]])
    except RuntimeError:
        return None
    row, inner, column = len(batch), len(batch) + 1, len(batch) + 2
    first: Dims = (*batch_dims[0], row, inner) if len(a) > 1 else (inner,)
    second: Dims = (*batch_dims[1], inner, column) if len(b) > 1 else (inner,)
    out: Dims = (*range(len(batch)), *((row,) if len(a) > 1 else ()), *((column,) if len(b) > 1 else ()))
    return _product([first, second], out, [input, other])


@rule("linear")
def linear(call: Call, input: Operand, weight: Operand, bias: Any = None) -> Spec | None:
    if not isinstance(input, Operand) or not isinstance(weight, Operand) or weight.ndim != 2 or not input.ndim:
        return None
    if input.shape[-1] != weight.shape[1]:
        return None
    batch = tuple(range(input.ndim - 1))
    inner, column = input.ndim, input.ndim + 1
    ins: list[Dims] = [(*batch, inner), (column, inner)]
    spec = contraction(ins, (*batch, column), [input, weight])
    if bias is None:
        return _in_range(spec, [input, weight])
    if not isinstance(bias, Operand) or bias.shape != weight.shape[:1]:
        return None
    return _in_range(_plus(spec, (column,)), [input, weight])


def _plus(spec: Spec, dims: Dims) -> Spec:
    """The spec with one more operand that is added to the product."""
    addend = len(spec.ins)
    return Spec(
        [*spec.ins, dims],
        spec.outs,
        spec.shapes,
        reduce=spec.reduce,
        linear=[(i, addend) for i in range(addend)],
        addends=frozenset((addend,)),
    )


_PRODUCTS: dict[str, tuple[list[Dims], Dims]] = {
    "addmm": ([(0, 1), (1, 2)], (0, 2)),
    "addmv": ([(0, 1), (1,)], (0,)),
    "addr": ([(0,), (1,)], (0, 1)),
    "baddbmm": ([(3, 0, 1), (3, 1, 2)], (3, 0, 2)),
    "addbmm": ([(3, 0, 1), (3, 1, 2)], (0, 2)),
}


@rule("addmm", "addmv", "addr", "baddbmm", "addbmm")
def add_product(
    call: Call, input: Operand, first: Operand, second: Operand, *, beta: Any = 1, alpha: Any = 1
) -> Spec | None:
    ins, out = _PRODUCTS[call.name]
    pair = [first, second]
    if any(not isinstance(o, Operand) or len(dims) != o.ndim for o, dims in zip(pair, ins, strict=True)):
        return None
    loops = [loop for dims, o in zip(ins, pair, strict=True) for loop in zip(dims, o.shape, strict=True)]
    if len(set(loops)) != len({loop for loop, _ in loops}):
        return None  # their sizes differ
    spec = contraction(ins, out, pair)
    full = spec.shapes[0]
    shift = len(full) - input.ndim
    if shift < 0 or any(n not in (1, m) for n, m in zip(input.shape, full[shift:], strict=True)):
        return None
    dims = tuple(f if n == m else None for f, n, m in zip(out[shift:], input.shape, full[shift:], strict=True))
    product = _plus(spec, dims)
    # The addend is the first argument here, so the operands have another order.
    spec = Spec(
        [dims, *spec.ins],
        spec.outs,
        spec.shapes,
        reduce=spec.reduce,
        linear=[tuple((i + 1) % 3 for i in group) for group in product.linear],
        addends=frozenset((0,)),
    )
    return _in_range(spec, pair)


@rule("einsum")
def einsum(call: Call, equation: str, *operands: Any) -> Spec | None:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    if not isinstance(equation, str) or not all(isinstance(t, Operand) for t in tensors):
        return None
    text = _spelled_out(equation.replace(" ", ""), [t.ndim for t in tensors])
    if text is None:
        return None
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors) or any(len(t) != o.ndim for t, o in zip(terms, tensors, strict=True)):
        return None
    if not arrow:
        right = "".join(sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1))
    if any(len(set(t)) != len(t) for t in terms) or len(set(right)) != len(right):
        return None  # diagonals
    sizes: dict[str, int] = {}
    for term, o in zip(terms, tensors, strict=True):
        for letter, n in zip(term, o.shape, strict=True):
            if sizes.setdefault(letter, n) != n:
                return None  # broadcasting of size 1
    factor = {letter: i for i, letter in enumerate(sizes)}
    ins: list[Dims] = [tuple(factor[c] for c in term) for term in terms]
    spec = _product(ins, tuple(factor[c] for c in right), tensors)
    contracted = {f for f in spec.reduce if sum(f in dims for dims in ins) > 1}
    if not contracted:
        return spec
    return replace(spec, localize=lambda chosen: _as_autocast_has_it if contracted & set(chosen.sharded) else None)


def _as_autocast_has_it(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    """An einsum in autocast's dtype for products: for a shard with one row it would multiply elementwise in float32."""
    result: torch.Tensor = func(*loc, **kw)
    return result.to(product_type(result.dtype, result.device))


def _spelled_out(equation: str, ndims: list[int]) -> str | None:
    """The equation with letters in place of `...`; None if it does not fit the operands."""
    if "." not in equation:
        return equation
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    counts = [ndim - len(term) + 3 if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=True)]
    free = [c for c in string.ascii_letters if c not in equation]
    longest = max(counts)
    if min(counts) < 0 or longest > len(free):
        return None
    # Aligned at the last dim, as in broadcasting.
    letters = "".join(free[:longest])
    spelled = [t.replace("...", letters[longest - n :]) for t, n in zip(terms, counts, strict=True)]
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "..." + "".join(once)
    full = f"{','.join(spelled)}->{right.replace('...', letters)}"
    return None if "." in full else full
