"""A few elements of a tensor as Python's numbers, by PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.checkpoint.native.dtype_names import STORED
from terrazzo.checkpoint.native.dtypes import OPAQUE, dtype_from_name, dtype_name
from terrazzo.checkpoint.native.memory import bytes_of


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
    found: list[Any] = values.double().tolist()
    return found


def from_bytes(dtype: str, data: bytes) -> list[Any]:
    """Like `listed`, for the bytes of elements of a dtype."""
    kind = dtype_from_name(dtype)
    values = torch.empty(len(data) // kind.itemsize, dtype=kind, device="cpu")
    bytes_of(values)[:] = data
    return listed(values)
