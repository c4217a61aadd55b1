"""Tensors as plain bytes in place, without a copy."""

from __future__ import annotations

import ctypes

import torch

_EMPTY = memoryview(bytearray())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable.  The caller keeps the tensor alive.

    >>> tensor = torch.tensor([65, 66], dtype=torch.uint8)
    >>> bytes(bytes_of(tensor))
    b'AB'
    """
    return address_range(tensor.data_ptr(), tensor.nbytes)


def address_range(address: int, nbytes: int) -> memoryview:
    """`nbytes` of this process's memory, writable.  The caller keeps them alive."""
    if nbytes == 0:
        return _EMPTY
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
