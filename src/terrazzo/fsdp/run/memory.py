"""Memory that is freed while its tensors still exist, and the protection against using them meanwhile.

Autograd saves unsharded parameters, and views of them, from forward to backward. So their tensors stay the same
objects, and only their storage's memory is freed while the group is sharded. Users may have kept such tensors, too. A
kernel would read at address zero, which ends the process. Therefore a storage without memory gets

* if PyTorch was built for CUDA, a message that every access raises;
* else, on CPU, the address of a *trap*: reading there gives NaN (-1 for integers), and writing or making a view raises,
    because the storage has no bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo._torch import storages, traps

# Functions of PyTorch: two of builds for CUDA only, and one of recent versions only.
_HAS_MESSAGES = storages.HAS_ACCESS_ERRORS
_HAS_TRAPS = traps.AVAILABLE


# Memory that was given back and is not freed yet, the oldest first. The next group of that size takes it over, because
# fresh memory costs the system a page fault for every 4 KiB. A tuple, because other threads, and `__del__` whenever the
# collector runs, may change it meanwhile.
_aside: tuple[Any, ...] = ()
_MOST_ASIDE = 2


def free_memory_aside() -> None:
    """Free memory that was given back and that no gather is about to take over."""
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
        self._trap: Any = None
        if not _HAS_MESSAGES and _HAS_TRAPS and tensor.device.type == "cpu" and self._nbytes:
            self._trap = traps.trap(self._nbytes)

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
        if not self._storage.nbytes():
            return
        if self._trap is not None:
            storages.swap_memory(self._storage, self._trap)
            _set_aside(self._trap)
        else:
            self._storage.resize_(0)
            if _HAS_MESSAGES:
                storages.set_access_error(storages.identity_of(self._storage), self._warning)

    def take_back(self) -> None:
        """Allocate new memory, uninitialised."""
        if self._storage.nbytes():
            return
        if self._trap is not None:
            found = _take_up(self._trap, self._nbytes)
            storages.swap_memory(self._storage, self._trap)
            if found:
                return
        elif _HAS_MESSAGES:
            storages.clear_access_error(storages.identity_of(self._storage))
        self._storage.resize_(self._nbytes)
