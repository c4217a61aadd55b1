"""Dtypes by their stored names: what a table of contents says of them, without PyTorch.

Two names per dtype: ours, PyTorch's own name, in manifests and typed objects; and the code of the safetensors format
in data files. A dtype that safetensors lacks is stored there as another one with the same bytes, with one more dim.
"""

from __future__ import annotations

from typing import Final

import msgspec

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
