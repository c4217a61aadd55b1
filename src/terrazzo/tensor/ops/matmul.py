"""Matrix products: contractions of operands over shared loops, linear in each operand."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from terrazzo.tensor.dispatch.shapes import dims_within
from terrazzo.tensor.dispatch.spec import HALF, Call, Operand, Spec, result_type
from terrazzo.tensor.ops.accumulate import product_type, sums_in_single
from terrazzo.tensor.ops.loops import loops
from terrazzo.tensor.ops.table import rule


def _product(text: str, operands: Sequence[Operand], addend: int | None = None) -> Spec | None:
    """The spec of a product, as einsum has it: loops that the result does not have are summed.

    `addend` is the operand that is added to it, if there is one: once, not by each rank that has a term.
    """
    ins, _, out = text.partition("->")
    factors = [i for i in range(len(operands)) if i != addend]
    linear = [(i,) if addend is None else (i, addend) for i in factors]
    spec = loops(text, sums="".join(sorted(set(ins) - set(out) - set(" .,_"))), linear=linear).spec(operands)
    if spec is not None and addend is not None:
        spec.addends = frozenset((addend,))
    return spec


def _in_range(spec: Spec | None, operands: list[Operand]) -> Spec | None:
    """The spec of a product; terms of a half type are reduced before it, and one number is summed in float32.

    Terms may be much larger than their sum, so that a product of them could overflow float16.
    """
    if spec is not None and spec.shapes == [()]:
        spec.joined = sums_in_single(_in_single)
    if spec is None or all(o.layout.dual is o.layout for o in operands):
        return spec
    return replace(spec, guard=_is_wide, otherwise=replace(spec, linear=[]))


def _in_single(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    return func(*[t.float() for t in loc], **{name: t.float() for name, t in kw.items()})


def _is_wide(loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
    dtype = result_type(loc, kw)
    assert dtype is not None
    device = next(v.device for v in (*loc, *kw.values()) if isinstance(v, torch.Tensor))
    return product_type(dtype, device) not in HALF


_PRODUCTS = {
    "mm": "mk, kn -> mn",
    "bmm": "bmk, bkn -> bmn",
    "mv": "mk, k -> m",
    "dot": "k, k ->",
    "inner_1d": "k, k ->",
    "vdot": "k, k ->",
    "outer": "m, n -> mn",
    "ger": "m, n -> mn",
    "addmm": "mk, kn -> mn",
    "addmv": "mk, k -> m",
    "addr": "m, n -> mn",
    "baddbmm": "bmk, bkn -> bmn",
    "addbmm": "bmk, bkn -> mn",
}


@rule("mm", "bmm", "mv", "dot", "inner_1d", "vdot", "outer", "ger")
def product(call: Call, input: Operand, other: Operand) -> Spec | None:
    return _in_range(_product(_PRODUCTS[call.name], [input, other]), [input, other])


@rule("matmul")
def matmul(call: Call, input: Operand, other: Operand) -> Spec | None:
    first, m = ("k", "") if input.ndim == 1 else ("...mk", "m")
    second, n = ("k", "") if other.ndim == 1 else ("...kn", "n")
    batch = "..." if len(first) + len(second) > 2 else ""
    return _in_range(_product(f"{first}, {second} -> {batch}{m}{n}", [input, other]), [input, other])


@rule("linear")
def linear(call: Call, input: Operand, weight: Operand, bias: Operand | None = None) -> Spec | None:
    if bias is None:
        return _in_range(_product("...k, nk -> ...n", [input, weight]), [input, weight])
    return _in_range(_product("...k, nk, n -> ...n", [input, weight, bias], addend=2), [input, weight])


@rule("addmm", "addmv", "addr", "baddbmm", "addbmm", any_number=True)
def add_product(
    call: Call, input: Operand, first: Operand, second: Operand, *, beta: Any = 1, alpha: Any = 1
) -> Spec | None:
    pair = [first, second]
    product = _product(_PRODUCTS[call.name], pair)
    if product is None:
        return None
    factors, _, out = _PRODUCTS[call.name].partition(" -> ")
    dims = dims_within(input.shape, product.shapes[0])
    if dims is None:
        return None
    added = "".join("_" if d is None else out[d] for d in dims)
    return _in_range(_product(f"{added}, {factors} -> {out}", [input, *pair], addend=0), pair)


@rule("einsum")
def einsum(call: Call, equation: str, *operands: Any) -> Spec | None:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    if not isinstance(equation, str) or not all(isinstance(t, Operand) for t in tensors):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "..." * ("." in left) + "".join(once)
    text = _spelled_out(left, right, [t.ndim for t in tensors])
    if text is None:
        return None
    left, _, right = text.partition("->")
    if any(len(set(term)) != len(term) for term in (*left.split(","), right)):
        return None  # diagonals
    spec = _in_range(_product(f"{left}->{right}", tensors), tensors)
    if spec is None:
        return None
    spec.joined = None  # the equation is not a tensor
    ins = spec.ins
    contracted = {f for f in spec.reduce if sum(f in dims for dims in ins) > 1}
    if not contracted:
        return spec
    return replace(spec, localize=lambda chosen: _as_autocast_has_it if contracted & set(chosen.sharded) else None)


def _as_autocast_has_it(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    """An einsum in autocast's dtype for products: for a shard with one row it would multiply elementwise in float32."""
    result: torch.Tensor = func(*loc, **kw)
    return result.to(product_type(result.dtype, result.device))


def _spelled_out(left: str, right: str, ndims: list[int]) -> str | None:
    """The equation with letters in place of `...`; None if it does not fit the operands."""
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    counts = [ndim - len(term) + 3 if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=True)]
    free = [c for c in string.ascii_letters if c not in left + right]
    longest = max(counts)
    if min(counts) < 0 or longest > len(free):
        return None
    # Aligned at the last dim, as in broadcasting.
    letters = "".join(free[:longest])
    spelled = [t.replace("...", letters[longest - n :]) for t, n in zip(terms, counts, strict=True)]
    full = f"{','.join(spelled)}->{right.replace('...', letters)}"
    return None if "." in full else full
