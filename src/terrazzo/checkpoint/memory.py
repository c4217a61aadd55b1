"""Tensors as plain bytes in place, without a copy."""

from __future__ import annotations

import ctypes

import torch

_EMPTY = memoryview(bytearray())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable.  The caller keeps the tensor alive.

    >>> bytes(bytes_of(torch.tensor([1, 2], dtype=torch.uint8)))
    b'\\x01\\x02'
    """
    return address_range(tensor.data_ptr(), tensor.nbytes)


def address_range(address: int, nbytes: int) -> memoryview:
    """`nbytes` of this process's memory, writable.  The caller keeps them alive."""
    if nbytes == 0:
        return _EMPTY
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
