"""Names of dtypes in stored files, and which conversions lose nothing.

Two names per dtype: ours, PyTorch's own name, in manifests and typed objects; and the code of the safetensors format
in data files.  A dtype that safetensors lacks is stored there as another one with the same bytes, with one more dim.
"""

from __future__ import annotations

from functools import cache

import torch

from terrazzo.errors import CheckpointFormatError

# dtype -> (safetensors code, length of an added last dim or None)
_SAFETENSORS: dict[torch.dtype, tuple[str, int | None]] = {
    torch.float64: ("F64", None),
    torch.float32: ("F32", None),
    torch.float16: ("F16", None),
    torch.bfloat16: ("BF16", None),
    torch.int64: ("I64", None),
    torch.int32: ("I32", None),
    torch.int16: ("I16", None),
    torch.int8: ("I8", None),
    torch.uint8: ("U8", None),
    torch.bool: ("BOOL", None),
    torch.uint16: ("U16", None),
    torch.uint32: ("U32", None),
    torch.uint64: ("U64", None),
    torch.float8_e4m3fn: ("F8_E4M3", None),
    torch.float8_e5m2: ("F8_E5M2", None),
    torch.float8_e4m3fnuz: ("U8", 1),
    torch.float8_e5m2fnuz: ("U8", 1),
    torch.float8_e8m0fnu: ("U8", 1),
    torch.complex32: ("F16", 2),
    torch.complex64: ("F32", 2),
    torch.complex128: ("F64", 2),
}
# Dtypes of which torch knows little but that they have bytes: integers of few bits, pairs of 4-bit floats, plain bits.
_OPAQUE = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)] + [
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits16",
]
OPAQUE: frozenset[torch.dtype] = frozenset(getattr(torch, name) for name in _OPAQUE if hasattr(torch, name))
_SAFETENSORS |= {dtype: ("U8", dtype.itemsize) for dtype in OPAQUE}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _SAFETENSORS}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The stored name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointFormatError(f"{dtype} tensors cannot be stored; convert them first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a stored name."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CheckpointFormatError(f"the dtype {name!r} is unknown to this release") from None


def safetensors_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """How a tensor appears in a safetensors header: code and shape."""
    dtype_name(dtype)  # the error for what cannot be stored
    code, added = _SAFETENSORS[dtype]
    return code, [*shape] if added is None else [*shape, added]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for a dtype that torch cannot copy, the same memory as numbers of the same size.

    >>> as_bytes(torch.empty(2, dtype=torch.uint4)).dtype
    torch.uint8
    """
    if tensor.dtype not in OPAQUE:
        return tensor
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


@cache
def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target`.

    >>> is_lossless(torch.bfloat16, torch.float32), is_lossless(torch.float32, torch.int8)
    (True, False)
    """
    if source == target:
        return True
    if source in OPAQUE or target in OPAQUE:
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
