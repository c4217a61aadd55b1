"""PyTorch's own types in values that are not tensors: see `objects`."""

from __future__ import annotations

import io
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch

from terrazzo.checkpoint.native.dtypes import dtype_from_name, dtype_name
from terrazzo.checkpoint.native.memory import bytes_of, fault_of
from terrazzo.errors import UnsupportedValueError

DTYPE: Final = 16
DEVICE: Final = 17
SIZE: Final = 18
TENSOR: Final = 19

# What a tensor in a value was.
_PLAIN_TENSOR: Final = False
_PARAMETER: Final = True
_FROZEN: Final = 2  # a parameter that requires no gradient
_REQUIRES_GRAD: Final = 3  # a tensor that requires one


def parts_of(value: Any) -> tuple[int, Any] | None:
    """The code of a value and what it is made of; None for a type that has none.

    >>> parts_of(torch.Size([2, 3])), parts_of(torch.Generator())
    ((18, [2, 3]), None)
    """
    kind = type(value)
    if kind is torch.dtype:
        return DTYPE, dtype_name(value)
    if kind is torch.device:
        return DEVICE, str(value)
    if kind is torch.Size:
        return SIZE, list(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return TENSOR, _tensor_parts(value)
    return None


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    fault = fault_of(tensor)
    if fault:
        raise UnsupportedValueError(fault)
    local = tensor.detach().cpu().contiguous()
    kind = (_FROZEN, _PARAMETER) if isinstance(tensor, torch.nn.Parameter) else (_PLAIN_TENSOR, _REQUIRES_GRAD)
    return [dtype_name(local.dtype), list(local.shape), bytes(bytes_of(local)), kind[tensor.requires_grad]]


def _tensor_from_parts(parts: list[Any]) -> torch.Tensor:
    name, shape, data, kind = parts
    dtype = dtype_from_name(name)
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a stored tensor of shape {shape} has {len(data)} bytes")
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    bytes_of(tensor)[:] = data
    if kind in (_PARAMETER, _FROZEN):
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        return torch.nn.Parameter(tensor, kind is _PARAMETER and differentiable)
    return tensor.requires_grad_(kind == _REQUIRES_GRAD)


UNPACK: dict[int, Callable[[Any], Any]] = {
    DTYPE: dtype_from_name,
    DEVICE: torch.device,
    SIZE: torch.Size,
    TENSOR: _tensor_from_parts,
}


def save(value: Any, file: io.BytesIO) -> None:
    """Write a value as PyTorch does."""
    torch.save(value, file)


def load(file: io.BytesIO, allow_pickle: bool) -> Any:
    """The value that PyTorch wrote."""
    return torch.load(file, map_location="cpu", weights_only=not allow_pickle)
