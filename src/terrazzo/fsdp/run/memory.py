"""Memory that is given back while tensors in it live on, and what becomes of those who use them meanwhile.

Autograd keeps whole parameters, and views of them, from forward to backward.  So their tensors stay the same, and their
storage loses its memory while the group is sharded.  Users may have kept such tensors too, and kernels do not look:
they would read at address zero, which ends the process.  Therefore a storage without memory gets

* where PyTorch was built for CUDA, a message that every access raises;
* elsewhere on CPU, the address of a *trap*: reading there gives NaN (-1 in integers), writing raises, and so does
  making a view, since the storage has no bytes.  A trap is as long as the memory was, but only addresses: all of it is
  one small piece of a file in memory, mapped again and again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from terrazzo._torch import storages

_PIECE = 4 << 20  # bytes, all ones: NaN in every float dtype
_MAP_FIXED = 0x10

# Accessors of PyTorch that only some builds for CUDA have, and one that all have, but only recent ones.
_HAS_MESSAGES = storages.HAS_ACCESS_ERRORS
_HAS_TRAPS = storages.CAN_SWAP and hasattr(os, "memfd_create")


class ReturnableMemory:
    """The memory of a tensor's storage. It is there at first."""

    def __init__(self, tensor: Tensor, warning: str) -> None:
        """`warning` is for those who use the tensor while its memory is returned."""
        self._storage: Any = tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._warning = warning
        self._is_there = True
        self._trap: Any = None
        if not _HAS_MESSAGES and _HAS_TRAPS and tensor.device.type == "cpu" and self._nbytes:
            self._trap = _make_trap(self._nbytes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies here."""
        try:
            found: bool = storages.memory_of(tensor) == storages.identity_of(self._storage)
        except (NotImplementedError, RuntimeError):
            return False  # sparse tensors have no storage, nor have those that torch.func wraps
        return found

    def give_back(self) -> None:
        """Free the memory."""
        if not self._is_there:
            return
        self._is_there = False
        if self._trap is not None:
            storages.swap_memory(self._storage, self._trap)
            self._trap.resize_(0)
        else:
            self._storage.resize_(0)
            if _HAS_MESSAGES:
                storages.set_access_error(storages.identity_of(self._storage), self._warning)

    def take_back(self) -> None:
        """Have new memory, with nothing in it."""
        if self._is_there:
            return
        self._is_there = True
        if self._trap is not None:
            storages.swap_memory(self._storage, self._trap)
        elif _HAS_MESSAGES:
            storages.clear_access_error(storages.identity_of(self._storage))
        self._storage.resize_(self._nbytes)


def _make_trap(nbytes: int) -> Any:
    """A storage without bytes, at an address from which at least `nbytes` can be read."""
    storage = storages.storage_at(_trap_of(nbytes), torch.device("cpu"), 0)
    storages.refuse_writes(torch.empty(0, dtype=torch.uint8).set_(storage))
    return storage


_longest: tuple[int, int] = (0, 0)  # address and length of the trap that all can use


def _trap_of(nbytes: int) -> int:
    global _longest
    if _longest[1] < nbytes:
        # Powers of two: traps that were too short stay where they are, and those are few.
        length = max(_PIECE, 1 << (nbytes - 1).bit_length())
        _longest = (_map_trap(length), length)
    return _longest[0]


def _map_trap(length: int) -> int:
    """Address of `length` bytes that are all ones."""
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
    """The C library's function; Python's own cannot map where it is told."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found: int | None = function(address, length, access, flags, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {length} bytes: {os.strerror(error)}")
    return found


__all__ = ["ReturnableMemory"]
