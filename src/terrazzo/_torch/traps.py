"""Traps: storages on the CPU without bytes, at an address where every float reads as NaN, and every integer as -1.

A trap has as many addresses as the memory that it stands for, all mapped to one small piece of a file in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from terrazzo._torch import storages

_PIECE = 4 << 20  # bytes, all ones: NaN in every float dtype
_MAP_FIXED = 0x10

AVAILABLE = storages.CAN_SWAP and hasattr(os, "memfd_create")


def trap(nbytes: int) -> Any:
    """A storage without bytes, at an address from which `nbytes` or more can be read."""
    storage = storages.storage_at(_trap_of(nbytes), torch.device("cpu"), 0)
    storages.refuse_writes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    return storage


_longest: tuple[int, int] = (0, 0)  # address and length of the longest trap, which all storages share


def _trap_of(nbytes: int) -> int:
    global _longest
    if _longest[1] < nbytes:
        # Powers of two, so that there are few traps: those that are too short are never unmapped.
        length = max(_PIECE, 1 << (nbytes - 1).bit_length())
        _longest = (_map_trap(length), length)
    return _longest[0]


def _map_trap(length: int) -> int:
    """The address of `length` bytes whose bits are all ones."""
    private, no_access = mmap.MAP_PRIVATE, 0
    address = _mmap(None, length, no_access, private | mmap.MAP_ANONYMOUS, -1)
    file = os.memfd_create("terrazzo-trap")
    try:
        os.write(file, b"\xff" * _PIECE)
        for start in range(0, length, _PIECE):
            _mmap(address + start, _PIECE, mmap.PROT_READ | mmap.PROT_WRITE, private | _MAP_FIXED, file)
    finally:
        os.close(file)
    return address


def _mmap(address: int | None, length: int, access: int, flags: int, file: int) -> int:
    """The C library's mmap; Python's cannot map at a given address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found: int | None = function(address, length, access, flags, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {length} bytes: {os.strerror(error)}")
    return found
