"""Elementwise operations: each dim of the output is a loop; operands broadcast.

PyTorch itself says which operations are elementwise (`torch.Tag.pointwise`). Which ones are linear is listed here: it
decides whether partial terms may pass, and a wrong entry would give silently wrong numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from terrazzo.tensor.copied_view import perhaps_another
from terrazzo.tensor.dispatch.shapes import broadcast_shapes, dims_within
from terrazzo.tensor.dispatch.spec import Call, Dims, LocalFunction, Operand, Spec, Static, within
from terrazzo.tensor.ops.table import decomposition, elementwise, rule
from terrazzo.tensor.strides import is_thin, note_strides, without_data

# Linear in the first operand, for any static arguments.
_LINEAR_UNARY = frozenset(
    [
        *("neg", "positive", "conj", "conj_physical", "resolve_conj", "resolve_neg", "deg2rad", "rad2deg"),
        *("real", "imag"),
    ]
)
# Elementwise, but not tagged so by all versions of PyTorch.
_ALSO_POINTWISE = frozenset(
    [
        *("type", "real", "imag", "conj", "resolve_conj", "resolve_neg", "complex", "polar", "isreal"),
        *("isclose", "floor_divide", "fake_quantize_per_tensor_affine", "hardswish", "leaky_relu", "logsigmoid"),
        *("log_sigmoid", "softsign", "tanhshrink", "special_erf", "special_erfc", "special_exp2", "special_expm1"),
        *("special_i0", "special_log1p"),
    ]
)
# Tagged pointwise, but random (handled elsewhere) or with other semantics.
_NOT_POINTWISE = frozenset(["equal", "frexp", "rrelu"])


@functools.lru_cache(maxsize=4096)
def is_pointwise(name: str) -> bool:
    """Whether the operation of this canonical name works element by element."""
    if name in _NOT_POINTWISE or "::" in name:
        return False
    if name in _ALSO_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[Dims]]:
    """The broadcast shape, and each operand's dims as factors 0, 1, ... of it; an expanded dim has none."""
    out = broadcast_shapes(*shapes)
    return out, [dims for shape in shapes if (dims := dims_within(shape, out)) is not None]


def pointwise_spec(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    """The rule for every elementwise operation."""
    if any(len(o.path) > 1 for o in call.operands):
        return None
    if call.name in ("eq", "ne") and any(a is None or isinstance(a, str) for a in call.args):
        return None  # `is` and the like: Python decides
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return None  # where(condition): the shape of the result depends on values
    try:
        out, ins = broadcast([o.shape for o in call.operands])
    except RuntimeError:
        return None  # the shapes do not broadcast: the operation itself raises
    return Spec(ins, [tuple(range(len(out)))], [out], linear=_linear_groups(call))


elementwise(is_pointwise, pointwise_spec)


def _linear_groups(call: Call) -> Sequence[tuple[int, ...]]:
    name, count = call.name, len(call.operands)
    if name in _LINEAR_UNARY:
        return [(0,)]
    if name in ("add", "sub", "rsub"):  # a number would be added to each rank's term, so several times
        return [(0, 1)] if count == 2 and all(isinstance(a, Operand) for a in call.args[:2]) else []
    if name == "mul":
        return [(i,) for i in range(count)]
    if name == "div":
        rounding = call.kwargs.get("rounding_mode")
        return [(0,)] if rounding is None and call.operands[0].path == (0,) else []
    if name == "where" and count == 3:
        return [(1, 2)]
    return []


@rule("clone", "alias", "lift_fresh", "detach", "_conj_copy", "requires_grad", "pin_memory", "_to_copy")
def same_elements(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec:
    return within(input, linear=[(0,)], moves_only=True)


@rule("to", "type_as", "cpu", "cuda", "half", "float", "double", "bfloat16", "cfloat", "cdouble", "chalf")
@rule("long", "int", "short", "char", "byte", "bool")
def converted(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec:
    """The other tensor, if there is one, gives only dtype and device, so it is not redistributed.

    Terms that the dtype cannot hold are reduced before (`dispatch.terms`).
    """
    dims = tuple(range(input.ndim))
    ins: list[Dims] = [dims, *[(None,) * o.ndim for o in call.operands[1:]]]
    unread = frozenset(range(1, len(ins)))
    in_format = kwargs.get("memory_format") not in (None, torch.preserve_format)
    localize = (lambda chosen: _in_format(chosen.ins[0].shape)) if in_format else None
    return Spec(ins, [dims], [input.shape], linear=[(0,)], moves_only=True, unread=unread, localize=localize)


def _in_format(shape: Sequence[int]) -> LocalFunction:
    """A conversion that copies a tensor which is not in the memory format, as the global strides say."""

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        given: torch.Tensor = loc[0]
        whole, memory_format = without_data(given, shape), kw["memory_format"]
        wanted = whole.to(memory_format=memory_format)
        if wanted is whole:
            made: torch.Tensor = func(*loc, **{name: value for name, value in kw.items() if name != "memory_format"})
            if made is given:
                return made
            wanted = whole.clone(memory_format=memory_format)  # a copy for another reason is in the format, too
            made = made.contiguous(memory_format=memory_format)
        else:
            made = func(*loc, **kw)
            made = made.clone(memory_format=memory_format) if made is given else made
        return note_strides(made, shape, wanted.stride()) if is_thin(given.shape, shape) else made

    return run


@rule("copy")
def copy(call: Call, input: Operand, src: Operand, non_blocking: bool = False) -> Spec | None:
    out, ins = broadcast([input.shape, src.shape])
    if out != tuple(input.shape):
        return None
    # PyTorch has no gradient for the functional form of copy.
    localize = None if call.inplace else lambda chosen: _copied
    return Spec(ins, [tuple(range(len(out)))], [out], linear=[(0, 1)], moves_only=True, localize=localize)


def _copied(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    return loc[1].to(loc[0].dtype).expand(loc[0].shape).clone()


@rule("fill", "zero", any_number=True)
def fill(call: Call, input: Operand, value: Static = 0) -> Spec | None:
    """Only in place; calls out of place use their decomposition. Terms of 0 are terms of it."""
    if not call.inplace or isinstance(value, torch.Tensor):
        return None
    zero = within(input, linear=[(0,)])
    if call.name == "zero" or not any(p.is_partial() for p in input.placements):
        return zero
    return replace(zero, guard=lambda loc, kw: [*loc, *kw.values()][1] == 0, otherwise=within(input))


@rule("frexp")
def frexp(call: Call, input: Operand) -> Spec:
    return within(input, outs=2)


@decomposition("prelu")
def prelu(input: Any, weight: Any) -> Any:
    """The weight has one slope, or one per channel."""
    if weight.ndim and weight.shape[0] != 1 and input.ndim > 1:
        weight = weight.reshape(-1, *(1,) * (input.ndim - 2))
    return torch.where(input > 0, input, input * weight)


@decomposition("contiguous")
def contiguous(input: Any, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """Whether a copy is needed is decided from the global tensor, alike on every rank."""
    if input.is_contiguous(memory_format=memory_format):
        return perhaps_another(input)
    return input.clone(memory_format=memory_format)
