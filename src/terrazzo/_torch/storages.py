"""Storages whose memory is freed while tensors still refer to them, and what an access to them does."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo._torch.declared import attribute, private

_ACCESS = "a storage whose memory fully_shard has freed raises when it is read, where torch was built for CUDA"
_TRAP = "a storage whose memory fully_shard has freed reads as NaN and cannot be written, on CPU"
_SILENT = "accesses to freed memory are not detected"
_CUDA = "2.11, in builds for CUDA"

set_access_error: Any = private(
    "torch._C._set_storage_data_ptr_access_error_msg", _ACCESS, since=_CUDA, instead=None, without=_TRAP
)
clear_access_error: Any = private(
    "torch._C._clear_storage_data_ptr_access_error_msg", _ACCESS, since=_CUDA, instead=None, without=_TRAP
)
_swap: Any = private("torch.UntypedStorage._swap_data_ptr_", _TRAP, since="2.12", instead=None, without=_SILENT)
storage_at: Any = private("torch._C._construct_storage_from_data_pointer", _TRAP, instead=None, without=_SILENT)
refuse_writes: Any = private("torch._C._set_throw_on_mutable_data_ptr", _TRAP, instead=None, without=_SILENT)

HAS_ACCESS_ERRORS = set_access_error is not None and clear_access_error is not None
CAN_SWAP = _swap is not None and storage_at is not None and refuse_writes is not None

attribute(
    "torch.UntypedStorage._cdata",
    "whether two tensors share memory, also while it is freed, and for subclasses without a storage",
    there=lambda: hasattr(torch.empty(0, device="cpu").untyped_storage(), "_cdata"),
)


def identity_of(storage: Any) -> int:
    """A number that is the same for all Python objects of one storage."""
    return storage._cdata


def memory_of(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor: equal for tensors that share it.

    An address would not do: wrapper subclasses refuse to give it, and it is 0 for all freed storages.
    """
    return identity_of(tensor.untyped_storage())


def swap_memory(storage: Any, other: Any) -> None:
    """Exchange the memory of two storages."""
    storage._swap_data_ptr_(other)
