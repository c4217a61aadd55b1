"""Tensors as plain bytes in place, without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from terrazzo._torch.dispatching import has_inner_tensors
from terrazzo.errors import CheckpointError

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
