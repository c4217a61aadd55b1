"""PyTorch's tensors and dtypes as what is stored.

A tensor as plain bytes in place, without a copy; the stored names of dtypes, which conversions lose nothing, elements
as Python's numbers; and PyTorch's own types in values that are not tensors (`objects`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from terrazzo._torch.dispatching import has_inner_tensors
from terrazzo.checkpoint.native.format import STORED
from terrazzo.errors import CheckpointError, CheckpointFormatError, UnsupportedValueError

OWN_MEMORY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_EMPTY = memoryview(bytearray())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; it keeps the tensor alive.

    The caller has checked a user's tensor with `fault_of`: without memory, the process would end.

    >>> tensor = torch.tensor([65, 66], dtype=torch.uint8)
    >>> bytes(bytes_of(tensor))
    b'AB'
    """
    nbytes = tensor.nbytes
    if nbytes == 0:
        return _EMPTY
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # views are of `memory`, whoever has them
    return memoryview(memory).cast("B")


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor of one of the types `OWN_MEMORY` lie in its storage: not if it was freed.

    This takes a fraction of a microsecond, and is exact for contiguous tensors. True for a tensor with gaps, and False
    for one that overlaps itself, can be wrong; `fault_of` is exact for all.

    >>> weight = torch.zeros(2, 3)
    >>> in_memory(weight), in_memory(weight[1:].t()), in_memory(torch.zeros(2, device="meta"))
    (True, True, False)
    >>> _ = weight.untyped_storage().resize_(0)
    >>> in_memory(weight)
    False
    """
    try:
        needed: Any = tensor.nbytes
        offset = tensor.storage_offset()
        if offset:
            needed += offset * tensor.itemsize
        return tensor.untyped_storage().nbytes() >= needed and not tensor.is_meta
    except (RuntimeError, ValueError):  # of other layouts, which have no storage
        return False


def _needed(tensor: torch.Tensor) -> int:
    """The bytes of storage up to a tensor's last element."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((length - 1) * stride for length, stride in steps) + 1) * tensor.itemsize


def fault_of(tensor: Any) -> str:
    """Why a tensor's elements cannot be read and written as memory of its own; empty if they can.

    >>> fault_of(torch.zeros(2)), fault_of(torch.eye(2).to_sparse())
    ('', 'a tensor of layout torch.sparse_coo cannot be stored; store its parts or make it dense')
    """
    kind = type(tensor)
    if kind in OWN_MEMORY and in_memory(tensor) and not tensor.is_nested and tensor.is_contiguous():
        return ""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return f"a {kind.__name__} has no shape and no values yet; run the module once first"
    if tensor.is_nested:
        return "a nested tensor cannot be stored; store the tensors that it is made of (`unbind()`)"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be stored; store its parts or make it dense"
    if tensor.is_meta:
        return "a tensor on the meta device has no values to store, and no memory to load into"
    if kind not in OWN_MEMORY and (has_inner_tensors(tensor) or not _has_storage(tensor)):
        return f"a {kind.__name__} cannot be stored; store the tensors that it wraps"
    if tensor.untyped_storage().nbytes() < _needed(tensor):
        return (
            f"the tensor's storage has {tensor.untyped_storage().nbytes()} bytes, too few for a tensor of shape "
            f"{list(tensor.shape)} and {tensor.dtype}: its memory was freed; allocate it again first"
        )
    return ""


def _has_storage(value: torch.Tensor) -> bool:
    """Whether a tensor of a subclass has its elements in memory of its own: a wrapper has none."""
    try:
        return value.untyped_storage().data_ptr() != 0 or value.numel() == 0
    except RuntimeError:
        return False


def empty(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the stored tensor `name`; raises a `CheckpointError` if there is not so much.

    >>> empty("w", (2, 3), torch.float32).shape
    torch.Size([2, 3])
    """
    try:
        return torch.empty(torch.Size(shape), dtype=dtype, device="cpu")
    except RuntimeError as error:
        nbytes = prod(shape) * dtype.itemsize
        raise CheckpointError(f"there is no memory for the {nbytes} bytes of {name!r}; read a part of it") from error


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors have the same elements because they are the same memory, as tied weights are.

    >>> weight = torch.zeros(2, 3)
    >>> same_memory(weight, weight.detach()), same_memory(weight, weight.clone()), same_memory(weight, weight[:1])
    (True, False, False)
    """
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.data_ptr() != 0
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


# ------------------------------------------------------------------ dtypes


_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORED if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
# Dtypes that torch can copy only as plain bytes.
OPAQUE: frozenset[torch.dtype] = frozenset(dtype for name, dtype in _BY_NAME.items() if STORED[name].opaque)


def dtype_name(dtype: torch.dtype) -> str:
    """The stored name of a dtype; raises an `UnsupportedValueError` for one that cannot be stored.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedValueError(f"{dtype} tensors cannot be stored; convert them first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a stored name."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CheckpointFormatError(f"the dtype {name!r} is unknown to this release") from None


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """How a tensor appears in a safetensors header: code and shape."""
    stored = STORED[dtype_name(dtype)]
    return stored.code, [*shape] if stored.added is None else [*shape, stored.added]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for a dtype that torch cannot copy, the same memory as numbers of the same size.

    >>> as_bytes(torch.empty(2, dtype=torch.uint4)).dtype
    torch.uint8
    """
    if tensor.dtype not in OPAQUE:
        return tensor
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def can_convert(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can make elements of `target` from those of `source`, with or without loss.

    >>> can_convert(torch.float64, torch.int8), can_convert(torch.float32, torch.uint4)
    (True, False)
    """
    return source == target or not (source in OPAQUE or target in OPAQUE)


@cache
def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target`.

    >>> is_lossless(torch.bfloat16, torch.float32), is_lossless(torch.float32, torch.int8)
    (True, False)
    """
    if source == target:
        return True
    if not can_convert(source, target):
        return False
    if source == torch.bool:
        return True
    if target == torch.bool:
        return False
    if target.is_complex:
        return is_lossless(source.to_real() if source.is_complex else source, target.to_real())
    if source.is_complex:
        return False
    if source.is_floating_point:
        return target.is_floating_point and _float_fits(source, target)
    if target.is_floating_point:
        info = torch.iinfo(source)
        exact = round(2 / torch.finfo(target).eps)  # all integers up to here have a value of their own
        return -exact <= info.min and info.max <= exact and info.max <= torch.finfo(target).max
    return torch.iinfo(target).min <= torch.iinfo(source).min and torch.iinfo(source).max <= torch.iinfo(target).max


def _float_fits(source: torch.dtype, target: torch.dtype) -> bool:
    if torch.float8_e8m0fnu in (source, target):  # powers of two only: no sign, no zero
        return source == torch.float8_e8m0fnu and target in (torch.float32, torch.float64, torch.bfloat16)
    small, large = torch.finfo(source), torch.finfo(target)
    smallest_subnormal = small.smallest_normal * small.eps
    return (
        small.eps >= large.eps
        and small.max <= large.max
        and smallest_subnormal >= large.smallest_normal * large.eps
        and (source.itemsize > 1 or target.itemsize > 1)  # the 8-bit kinds differ in what stands for inf and nan
    )


def listed(tensor: torch.Tensor) -> list[Any]:
    """The elements of a tensor, as `numbers_of` has them.

    >>> listed(torch.tensor([[1, 2]])), listed(torch.zeros(1, dtype=torch.complex64))
    ([1.0, 2.0], ['0j'])
    """
    if tensor.dtype in OPAQUE:
        return list(STORED[dtype_name(tensor.dtype)].as_text(bytes(bytes_of(tensor.contiguous()))))
    values = tensor.reshape(-1)
    if values.is_complex():
        return [str(value) for value in values.to(torch.complex128).tolist()]
    return values.double().tolist()


def from_bytes(dtype: str, data: bytes) -> list[Any]:
    """Like `listed`, for the bytes of elements of a dtype."""
    kind = dtype_from_name(dtype)
    values = torch.empty(len(data) // kind.itemsize, dtype=kind, device="cpu")
    bytes_of(values)[:] = data
    return listed(values)


# ------------------------------------------------------------------ PyTorch's own types in values that are not tensors


DTYPE: Final = 16
DEVICE: Final = 17
SIZE: Final = 18
TENSOR: Final = 19

# What a tensor in a value was.
_PLAIN_TENSOR: Final = False
_PARAMETER: Final = True
_FROZEN: Final = 2  # a parameter that requires no gradient
_REQUIRES_GRAD: Final = 3  # a tensor that requires one


def parts_of(value: Any) -> tuple[int, Any] | None:
    """The code of a value and what it is made of; None for a type that has none.

    >>> parts_of(torch.Size([2, 3])), parts_of(torch.Generator())
    ((18, [2, 3]), None)
    """
    kind = type(value)
    if kind is torch.dtype:
        return DTYPE, dtype_name(value)
    if kind is torch.device:
        return DEVICE, str(value)
    if kind is torch.Size:
        return SIZE, list(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return TENSOR, _tensor_parts(value)
    return None


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    fault = fault_of(tensor)
    if fault:
        raise UnsupportedValueError(fault)
    local = tensor.detach().cpu().contiguous()
    kind = (_FROZEN, _PARAMETER) if isinstance(tensor, torch.nn.Parameter) else (_PLAIN_TENSOR, _REQUIRES_GRAD)
    return [dtype_name(local.dtype), list(local.shape), bytes(bytes_of(local)), kind[tensor.requires_grad]]


def _tensor_from_parts(parts: list[Any]) -> torch.Tensor:
    name, shape, data, kind = parts
    dtype = dtype_from_name(name)
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a stored tensor of shape {shape} has {len(data)} bytes")
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    bytes_of(tensor)[:] = data
    if kind in (_PARAMETER, _FROZEN):
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return torch.nn.Parameter(tensor, kind is _PARAMETER and differentiable)
    return tensor.requires_grad_(kind == _REQUIRES_GRAD)


UNPACK: dict[int, Callable[[Any], Any]] = {
    DTYPE: dtype_from_name,
    DEVICE: torch.device,
    SIZE: torch.Size,
    TENSOR: _tensor_from_parts,
}
