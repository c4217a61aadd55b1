"""The arguments and results of a program: the tensors in them, and a key for the rest."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.counting import CountingParameter
from terrazzo._torch.dispatching import tree_flatten, tree_unflatten
from terrazzo.errors import CaptureError
from terrazzo.layout import Placement
from terrazzo.tensor.dtensor import DTensor, local_of, wrap

_BY_VALUE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, enum.Enum)
# Types of objects that are compared by identity: another object is another argument, and the same one is unchanged.
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, MethodType, type, torch.Generator, Placement, DeviceMesh)
_CONSTANTS = (*_BY_VALUE, *_BY_IDENTITY)
_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter, CountingParameter])
_SPECIAL = frozenset(
    [torch.complex32, torch.complex64, torch.complex128, torch.quint8, torch.qint8, torch.qint32, torch.quint4x2]
)


class Unkeyable(Exception):
    """An argument for which no graph can be kept."""


def collect(value: Any, key: list[Any], tensors: list[Any]) -> None:
    """Append the tensors in an argument to `tensors`, and what identifies the rest of it to `key`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        key.append(torch.Tensor)
        tensors.append(value)
    elif kind is tuple or kind is list:
        key.append(kind)
        key.append(len(value))
        for item in value:
            collect(item, key, tensors)
    elif kind is dict:
        key.append(dict)
        key.append(len(value))
        for name, item in value.items():
            collect(name, key, tensors)
            collect(item, key, tensors)
    elif isinstance(value, slice):
        key.append(slice)
        for bound in (value.start, value.stop, value.step):
            collect(bound, key, tensors)
    elif isinstance(value, _CONSTANTS):
        key.append(kind)
        key.append(digits_of(value) if isinstance(value, float | complex) else value)
    else:
        _collect_other(value, key, tensors)


def digits_of(value: Any) -> Any:
    """What identifies a number among those of its type: 0.0 equals -0.0, and a NaN does not equal itself."""
    if isinstance(value, float):
        return value.hex()
    return (value.real.hex(), value.imag.hex()) if isinstance(value, complex) else value


def _collect_other(value: Any, key: list[Any], tensors: list[Any]) -> None:
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        raise Unkeyable(
            f"an argument of type {type(value).__name__}: arguments must be tensors, numbers, strings, functions, or "
            "tuples, lists, dicts and registered pytrees of these"
        )
    key.append(spec)
    for leaf in leaves:
        collect(leaf, key, tensors)


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, as those that a program makes while it is captured have not."""
    return type(local_of(tensor)) in _PLAIN


_attributes = attrgetter("dtype", "device", "requires_grad", "layout")


def append_tensor_keys(tensors: Sequence[Any], key: list[Any]) -> None:
    """Append what a graph assumes of each tensor, and which of them are the same object; raises Unkeyable."""
    ids = []
    for tensor in tensors:
        kind = type(tensor)
        if kind is DTensor:
            local = tensor._local
            key.append(tensor._layout)
        elif kind in _PLAIN:
            local = tensor
            key.append(tensor.shape)
        elif isinstance(tensor, DTensor):
            local = tensor._local
            if type(tensor) is not DTensor:  # a pending one becomes a DTensor above
                key.append(type(tensor))
            key.append(tensor._layout)
        elif isinstance(tensor, torch.Tensor):
            raise Unkeyable(f"a {kind.__name__}")
        else:
            key.append(tensor)
            continue
        attributes = _attributes(local)
        if type(local) not in _PLAIN or attributes[0] in _SPECIAL or attributes[3] is not torch.strided:
            _check_ordinary(local)
        key.append(attributes)
        key.append(local.stride())
        ids.append(id(local))
    if len(set(ids)) != len(ids):
        key.append(tuple([ids.index(i) for i in ids]))


def is_resizable(tensor: Any) -> bool:
    """Whether an argument may have other sizes in the same graph: it is plain, and they say all about its memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.ndim > 0 and tensor.is_contiguous()


def append_key_but_size(tensor: torch.Tensor, key: list[Any]) -> None:
    """Append what a graph for several sizes assumes of a tensor, besides its sizes."""
    key += (tensor.ndim, *_attributes(tensor))


def _check_ordinary(local: torch.Tensor) -> None:
    if type(local) not in _PLAIN:
        raise Unkeyable(f"a {type(local).__name__} as a local tensor")
    if local.layout is not torch.strided:
        raise Unkeyable(f"a tensor of layout {local.layout}")
    if local.is_quantized or local.is_conj() or local.is_neg():
        raise Unkeyable("a conjugated view or a quantized tensor")


def describe_tensor(tensor: Any) -> str:
    """One tensor as text, for a report."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    local = local_of(tensor)
    placed = f" {tuple(tensor.placements)}" if isinstance(tensor, DTensor) else ""
    gradient = ", requires grad" if local.requires_grad else ""
    strides = "" if local.is_contiguous() else f", strides {local.stride()}"
    kind = "DTensor" if isinstance(tensor, DTensor) else "tensor"
    dtype = str(local.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)}{placed} {dtype} on {local.device}{strides}{gradient}"


def describe_value(label: str, value: Any) -> Iterator[tuple[str, str]]:
    """One argument as text, item by item, for a report."""
    if isinstance(value, torch.Tensor):
        yield label, describe_tensor(value)
    elif type(value) in (tuple, list):
        yield f"type of {label}", f"{type(value).__name__} of {len(value)}"
        for i, item in enumerate(value):
            yield from describe_value(f"{label}[{i}]", item)
    elif type(value) is dict:
        yield f"keys of {label}", repr(list(value))
        for name, item in value.items():
            yield from describe_value(f"{label}[{name!r}]", item)
    else:
        yield label, repr(value)


def _is_constant(leaf: Any) -> bool:
    parts = leaf if isinstance(leaf, torch.Size) else (leaf.start, leaf.stop, leaf.step) if type(leaf) is slice else ()
    return isinstance(leaf, _CONSTANTS) and not any(isinstance(part, torch.SymInt) for part in parts)


# ------------------------------------------------------------------ outputs


@dataclass(frozen=True, slots=True)
class Output:
    """Where one leaf of a program's result comes from: input number `source`, the graph's result number `result`, or
    `constant`."""

    source: int | None = None
    result: int | None = None
    layout: Any = None
    constant: Any = None


class Outputs:
    """The result of a program, without its tensors."""

    def __init__(self, leaves: Sequence[Output], spec: Any) -> None:
        self.leaves = leaves
        self.spec = spec
        only = leaves[0] if len(leaves) == 1 else None
        self._single = only if only is not None and spec == tree_flatten(0)[1] else None

    def shifted(self, by: int) -> Outputs:
        """These outputs, made of results whose numbers are higher by `by`."""
        moved = [leaf if leaf.result is None else replace(leaf, result=leaf.result + by) for leaf in self.leaves]
        return Outputs(moved, self.spec)

    def build(self, results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        """The program's result, built from the graph's results."""
        if self._single is not None:
            return _leaf(self._single, results, inputs)
        return tree_unflatten([_leaf(leaf, results, inputs) for leaf in self.leaves], self.spec)


def _leaf(leaf: Output, results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
    if leaf.result is not None:
        local = results[leaf.result]
        return local if leaf.layout is None else wrap(local, leaf.layout)
    return leaf.constant if leaf.source is None else inputs[leaf.source]


def take_apart(result: Any, sources: dict[int, int], locals_of_sources: dict[int, int]) -> tuple[Outputs, list[Any]]:
    """A program's result as `Outputs` and the list of the tensors that the graph must return.

    `sources` and `locals_of_sources` map the ids of tensors that are inputs themselves to the inputs' numbers.
    """
    leaves, spec = tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))  # it would become a tuple
    outputs: list[Output] = []
    returned: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            source = sources.get(id(leaf))
            if source is None and not isinstance(leaf, DTensor):
                source = locals_of_sources.get(id(leaf))
            if source is not None:
                outputs.append(Output(source=source))
                continue
            layout = leaf._layout if isinstance(leaf, DTensor) else None
            outputs.append(Output(result=len(returned), layout=layout))
            returned.append(local_of(leaf))
        elif _is_constant(leaf):
            outputs.append(Output(constant=leaf))
        else:
            raise CaptureError(
                f"the program returns a {type(leaf).__name__}, whose tensors cannot be found: return tensors, numbers, "
                "and tuples, lists, dicts or registered pytrees (torch.utils._pytree) of them",
                operation="return",
            )
    return Outputs(outputs, spec), returned
