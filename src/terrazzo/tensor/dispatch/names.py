"""One name for the many functions that are one operation, and what its result shares with its argument.

`torch.add`, `Tensor.__add__`, `Tensor.add` and `aten.add.Tensor` are all `add`; `Tensor.add_` and `aten.add_.Tensor`
are `add`, in place. Rules are registered under these names.

Whether a result has new memory, is a view of an argument, or is the argument itself when nothing changes, is read from
the operators' schemas. Operations of the last kind (`contiguous`, `to`, `positive`) return the very object that they
were given where they have nothing to do, so that writes to the result reach the argument.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from terrazzo._torch.dispatching import qualified_name, schema_of

_ALIASES = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__isub__": "sub_", "__mul__": "mul",
    "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__itruediv__": "div_", "__div__": "div",
    "__idiv__": "div_", "__matmul__": "matmul", "__pow__": "pow", "__ipow__": "pow_", "__neg__": "neg",
    "__pos__": "positive", "__abs__": "abs", "__invert__": "bitwise_not", "__eq__": "eq", "__ne__": "ne",
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__and__": "bitwise_and",
    "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__iand__": "bitwise_and_", "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_", "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_",
    "__mod__": "remainder", "__imod__": "remainder_", "true_divide": "div", "divide": "div", "multiply": "mul",
    "subtract": "sub", "negative": "neg", "absolute": "abs", "true_divide_": "div_", "divide_": "div_",
    "multiply_": "mul_", "subtract_": "sub_", "negative_": "neg_", "absolute_": "abs_", "concat": "cat",
    "concatenate": "cat", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "swapaxes": "transpose", "swapdims": "transpose",
    "moveaxis": "movedim", "get_T": "numpy_T", "get_mT": "mT", "get_H": "H", "get_mH": "mH", "get_real": "real",
    "get_imag": "imag", "special_expit": "sigmoid", "special_log_softmax": "log_softmax",
    "special_softmax": "softmax", "clip": "clamp", "clip_": "clamp_", "fix": "trunc", "fix_": "trunc_",
    "linalg_matmul": "matmul",
    "dsmm": "mm", "spmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm",  # in Python equal to the other
}  # fmt: skip


@functools.lru_cache(maxsize=8192)
def canonical_name(func: Any) -> tuple[str, bool]:
    """The operation's name, and whether this function writes its first argument.

    >>> canonical_name(torch.Tensor.add_), canonical_name(torch.ops.aten.add.Tensor), canonical_name(torch.multiply)
    (('add', True), ('add', False), ('mul', False))
    """
    qualified = qualified_name(func)
    if qualified:
        namespace, name = qualified.split("::")
        if namespace not in ("aten", "prims"):
            return f"{namespace}::{name}", False
    else:
        name = getattr(func, "__name__", None) or str(func)
        if name in ("__get__", "__set__", "__delete__"):
            name = f"{name.strip('_')}_{getattr(func.__self__, '__name__', '')}"
    if func is torch.ops.aten.view.default:
        return "reshape", False  # C++ calls it with the wrapper's strides, which are always those of a new tensor
    name = _ALIASES.get(name, name)
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, False


Alias = Literal["new", "view", "same", "written"]

_SAME = frozenset(
    [
        *("to", "contiguous", "positive", "real", "conj", "resolve_conj", "resolve_neg", "type_as", "cpu", "cuda"),
        "conj_physical",
        *("half", "float", "double", "bfloat16", "long", "int", "short", "char", "byte", "bool", "cfloat", "cdouble"),
        *("chalf", "type", "flatten", "pin_memory", "_autocast_to_full_precision", "_autocast_to_reduced_precision"),
    ]
)


VIEWS_IN_PYTHON = frozenset({"__getitem__", "H"})
"""Views that are not ATen operators; an operator of the same name is something else."""


@functools.lru_cache(maxsize=4096)
def alias_of(name: str, inplace: bool = False) -> Alias:
    """The alias class of an operation by canonical name.

    >>> alias_of("add"), alias_of("transpose"), alias_of("contiguous"), alias_of("add", inplace=True)
    ('new', 'view', 'same', 'written')
    """
    if inplace:
        return "written"
    if name in _SAME:
        return "same"
    if name in VIEWS_IN_PYTHON:
        return "view"
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return "new"
    for overload in packet.overloads():
        schema = schema_of(getattr(packet, overload))
        if schema.returns and schema.arguments:
            info = schema.returns[0].alias_info
            if info is not None and not info.is_write:
                return "view"
    return "new"
