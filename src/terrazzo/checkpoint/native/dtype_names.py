"""Dtypes by their stored names, and a few elements as Python's numbers, without PyTorch.

Two names per dtype: ours, PyTorch's own name, in manifests and typed objects; and the code of the safetensors format
in data files. A dtype that safetensors lacks is stored there as another one with the same bytes, with one more dim.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.errors import CheckpointFormatError


class Stored(msgspec.Struct, frozen=True, gc=False):
    """How a dtype is stored.

    Attributes:
        itemsize: the bytes of an element.
        code: safetensors' name of it, or of another dtype.
        added: of another dtype, the length of the last dim that is added.
        opaque: whether torch knows little of it but that it has bytes: integers of few bits, pairs of 4-bit floats,
            plain bits.
    """

    itemsize: int
    code: str
    added: int | None = None
    opaque: bool = False

    def as_text(self, data: bytes) -> list[str]:
        """Each element of `data` as hexadecimal digits.

        >>> STORED["int4"].as_text(bytes([7, 1]))
        ['0x07', '0x01']
        """
        width = self.itemsize
        return [f"0x{data[at : at + width][::-1].hex()}" for at in range(0, len(data), width)]


_PLAIN: Final = {
    "float64": Stored(8, "F64"),
    "float32": Stored(4, "F32"),
    "float16": Stored(2, "F16"),
    "bfloat16": Stored(2, "BF16"),
    "int64": Stored(8, "I64"),
    "int32": Stored(4, "I32"),
    "int16": Stored(2, "I16"),
    "int8": Stored(1, "I8"),
    "uint8": Stored(1, "U8"),
    "bool": Stored(1, "BOOL"),
    "uint16": Stored(2, "U16"),
    "uint32": Stored(4, "U32"),
    "uint64": Stored(8, "U64"),
    "float8_e4m3fn": Stored(1, "F8_E4M3"),
    "float8_e5m2": Stored(1, "F8_E5M2"),
    "float8_e4m3fnuz": Stored(1, "U8", 1),
    "float8_e5m2fnuz": Stored(1, "U8", 1),
    "float8_e8m0fnu": Stored(1, "U8", 1),
    "complex32": Stored(4, "F16", 2),
    "bcomplex32": Stored(4, "BF16", 2),
    "complex64": Stored(8, "F32", 2),
    "complex128": Stored(16, "F64", 2),
}
_OF_ONE_BYTE: Final = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)] + [
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
]
STORED: Final = {
    **_PLAIN,
    **{name: Stored(1, "U8", 1, True) for name in _OF_ONE_BYTE},
    "bits16": Stored(2, "U8", 2, True),
}


def itemsize_of(name: str) -> int:
    """The bytes of an element of the dtype that has this stored name.

    >>> itemsize_of("bfloat16")
    2
    """
    try:
        return STORED[name].itemsize
    except KeyError:
        raise CheckpointFormatError(f"the dtype {name!r} is unknown to this release") from None


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
        from terrazzo.checkpoint.native.dtypes import from_bytes  # imports PyTorch, which knows all

        return from_bytes(dtype, data)
    values = np.frombuffer(data, kind)
    if dtype in ("bfloat16", "bcomplex32"):
        values = (values.astype("<u4") << 16).view("<f4" if dtype == "bfloat16" else "<c8")
    if values.dtype.kind == "c":
        return [str(value) for value in values.astype(np.complex128).tolist()]
    found: list[Any] = values.astype(np.float64).tolist()
    return found
