"""Tensors as plain bytes in place, without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch

from terrazzo.errors import CheckpointError

_EMPTY = memoryview(bytearray())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; it keeps the tensor alive.

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


def empty(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the stored tensor `name`; raises a `CheckpointError` if there is not so much.

    >>> empty("w", (2, 3), torch.float32).shape
    torch.Size([2, 3])
    """
    try:
        return torch.empty(torch.Size(shape), dtype=dtype)
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
