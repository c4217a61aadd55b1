"""PyTorch's dtypes: their stored names, which conversions lose nothing, and elements as Python's numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from terrazzo.checkpoint.native.dtype_names import STORED
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.errors import CheckpointFormatError, UnsupportedValueError

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORED if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
# Dtypes that torch can copy only as plain bytes.
OPAQUE: frozenset[torch.dtype] = frozenset(dtype for name, dtype in _BY_NAME.items() if STORED[name].opaque)


def dtype_name(dtype: torch.dtype) -> str:
    """The stored name of a dtype; raises an `UnsupportedValueError` for one that cannot be stored.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedValueError(f"{dtype} tensors cannot be stored; convert them first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a stored name."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CheckpointFormatError(f"the dtype {name!r} is unknown to this release") from None


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """How a tensor appears in a safetensors header: code and shape."""
    stored = STORED[dtype_name(dtype)]
    return stored.code, [*shape] if stored.added is None else [*shape, stored.added]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for a dtype that torch cannot copy, the same memory as numbers of the same size.

    >>> as_bytes(torch.empty(2, dtype=torch.uint4)).dtype
    torch.uint8
    """
    if tensor.dtype not in OPAQUE:
        return tensor
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def can_convert(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can make elements of `target` from those of `source`, with or without loss.

    >>> can_convert(torch.float64, torch.int8), can_convert(torch.float32, torch.uint4)
    (True, False)
    """
    return source == target or not (source in OPAQUE or target in OPAQUE)


@cache
def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target`.

    >>> is_lossless(torch.bfloat16, torch.float32), is_lossless(torch.float32, torch.int8)
    (True, False)
    """
    if source == target:
        return True
    if not can_convert(source, target):
        return False
    if source == torch.bool:
        return True
    if target == torch.bool:
        return False
    if target.is_complex:
        return is_lossless(source.to_real() if source.is_complex else source, target.to_real())
    if source.is_complex:
        return False
    if source.is_floating_point:
        return target.is_floating_point and _float_fits(source, target)
    if target.is_floating_point:
        info = torch.iinfo(source)
        exact = round(2 / torch.finfo(target).eps)  # all integers up to here have a value of their own
        return -exact <= info.min and info.max <= exact and info.max <= torch.finfo(target).max
    return torch.iinfo(target).min <= torch.iinfo(source).min and torch.iinfo(source).max <= torch.iinfo(target).max


def _float_fits(source: torch.dtype, target: torch.dtype) -> bool:
    if torch.float8_e8m0fnu in (source, target):  # powers of two only: no sign, no zero
        return source == torch.float8_e8m0fnu and target in (torch.float32, torch.float64, torch.bfloat16)
    small, large = torch.finfo(source), torch.finfo(target)
    smallest_subnormal = small.smallest_normal * small.eps
    return (
        small.eps >= large.eps
        and small.max <= large.max
        and smallest_subnormal >= large.smallest_normal * large.eps
        and (source.itemsize > 1 or target.itemsize > 1)  # the 8-bit kinds differ in what stands for inf and nan
    )


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
