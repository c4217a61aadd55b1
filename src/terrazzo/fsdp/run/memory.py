"""Memory that is freed while its tensors still exist, and the protection against using them meanwhile.

Autograd saves unsharded parameters, and views of them, from forward to backward. So their tensors stay the same
objects, and only their storage's memory is freed while the group is sharded. Users may have kept such tensors, too. A
kernel would read at address zero, which ends the process. Therefore a storage without memory gets

* if PyTorch was built for CUDA, a message that every access raises;
* else, on CPU, the address of a *trap*: reading there gives NaN (-1 for integers), and writing or making a view raises,
    because the storage has no bytes. A trap has as many addresses as the memory had, but all are mapped to one small
    piece of a file in memory.
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

# Functions of PyTorch: two of builds for CUDA only, and one of recent versions only.
_HAS_MESSAGES = storages.HAS_ACCESS_ERRORS
_HAS_TRAPS = storages.CAN_SWAP and hasattr(os, "memfd_create")


# Memory that was given back and is not freed yet, the oldest first. The next group of that size takes it over, because
# fresh memory costs the system a page fault for every 4 KiB. A tuple, because other threads, and `__del__` whenever the
# collector runs, may change it meanwhile.
_aside: tuple[Any, ...] = ()
_MOST_ASIDE = 2


def free_memory_aside() -> None:
    """Free memory that was given back, and that nobody is about to take over."""
    global _aside
    _aside = ()


def _set_aside(storage: Any) -> None:
    """Take the memory of this storage."""
    global _aside
    holder = torch.UntypedStorage(0)
    storages.swap_memory(storage, holder)
    _aside = (*_aside, holder)[-_MOST_ASIDE:]


def _take_up(storage: Any, nbytes: int) -> bool:
    """Give this storage, which has none, memory that was set aside, if there is some of this size; returns whether
    there was. If not, all of it is freed, so that it never adds to the most that is in use."""
    global _aside
    for holder in _aside:
        if holder.nbytes() == nbytes:
            storages.swap_memory(storage, holder)
            if storage.nbytes() == nbytes:  # no other thread was quicker
                _aside = tuple([each for each in _aside if each is not holder])
                return True
    _aside = ()
    return False


class ReturnableMemory:
    """The memory of a tensor's storage, which can be freed and allocated again."""

    def __init__(self, tensor: Tensor, warning: str) -> None:
        """`warning` is the message for using the tensor while its memory is freed."""
        self._storage: Any = tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._warning = warning
        self._is_there = True
        self._trap: Any = None
        if not _HAS_MESSAGES and _HAS_TRAPS and tensor.device.type == "cpu" and self._nbytes:
            self._trap = _make_trap(self._nbytes)

    _free_aside = staticmethod(free_memory_aside)  # when the interpreter ends, the module's names may be gone

    def __del__(self) -> None:
        self._free_aside()

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in this memory."""
        try:
            found: bool = storages.memory_of(tensor) == storages.identity_of(self._storage)
        except (NotImplementedError, RuntimeError):
            return False  # sparse tensors and those that torch.func wraps have no storage
        return found

    def give_back(self) -> None:
        """Free the memory."""
        if not self._is_there:
            return
        self._is_there = False
        if self._trap is not None:
            storages.swap_memory(self._storage, self._trap)
            _set_aside(self._trap)
        else:
            self._storage.resize_(0)
            if _HAS_MESSAGES:
                storages.set_access_error(storages.identity_of(self._storage), self._warning)

    def take_back(self) -> None:
        """Allocate new memory, uninitialised."""
        if self._is_there:
            return
        self._is_there = True
        if self._trap is not None:
            found = _take_up(self._trap, self._nbytes)
            storages.swap_memory(self._storage, self._trap)
            if found:
                return
        elif _HAS_MESSAGES:
            storages.clear_access_error(storages.identity_of(self._storage))
        self._storage.resize_(self._nbytes)


def _make_trap(nbytes: int) -> Any:
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


__all__ = ["ReturnableMemory"]
