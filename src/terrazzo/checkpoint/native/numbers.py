"""A few elements of a tensor as Python's numbers, without PyTorch where NumPy knows the dtype."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.native.dtype_names import STORED

_NUMPY: Final = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",  # the high half of a float32
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "bool": "?",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bcomplex32": "<u2",  # two of these
    "complex64": "<c8",
    "complex128": "<c16",
}


def numbers_of(dtype: str, data: bytes) -> list[Any]:
    """Elements of a dtype from their bytes: real ones as floats, complex ones and those with which torch cannot compute
    as text.

    >>> numbers_of("bfloat16", bytes.fromhex("803f0040")), numbers_of("complex64", bytes(8))
    ([1.0, 2.0], ['0j'])
    >>> numbers_of("bcomplex32", bytes.fromhex("803f0040"))
    ['(1+2j)']
    >>> numbers_of("int4", bytes([7, 1]))
    ['0x07', '0x01']
    """
    if STORED[dtype].opaque:
        return list(STORED[dtype].as_text(data))
    kind = _NUMPY.get(dtype)
    if kind is None:
        from terrazzo.checkpoint.native.torch_numbers import from_bytes  # imports PyTorch, which knows all

        return from_bytes(dtype, data)
    values = np.frombuffer(data, kind)
    if dtype in ("bfloat16", "bcomplex32"):
        values = (values.astype("<u4") << 16).view("<f4" if dtype == "bfloat16" else "<c8")
    if values.dtype.kind == "c":
        return [str(value) for value in values.astype(np.complex128).tolist()]
    found: list[Any] = values.astype(np.float64).tolist()
    return found
