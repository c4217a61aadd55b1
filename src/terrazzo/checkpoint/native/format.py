"""Constants of the native format, names of its files and of dtypes, and its codec: see docs/format.md."""

from __future__ import annotations

import re
import threading
from math import prod
from typing import Final

import msgspec
import numpy as np
import xxhash
import zstandard

from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError

MAGIC: Final = b"TERRAZZO"
VERSION: Final = 1  # of the format: another one is not read

MANIFEST: Final = "manifest.terrazzo"
SEAL: Final = "seal.terrazzo"
"""Checksums beside a checkpoint of another format (`tools.verify`)."""
# Data begins at a multiple of this in every data file, and so does every chunk whose size is a multiple of it, unless
# a chunk that is none comes before.
PAGE: Final = 4096
# Checksums are kept per block of this many bytes of a chunk, so that part of a chunk can be read and still be checked.
BLOCK: Final = 256 << 10
_SMALL_BLOCK: Final = 4 << 10
_LONG_ROW: Final = 64 << 10
# Encoded objects up to this size live in the manifest itself, larger ones in a data file.
INLINE_LIMIT: Final = 4096
# Indexes of ranks up to this size live in the manifest, larger ones in a file.
INLINE_INDEX: Final = 16 << 10

_DATA_NAME = re.compile(r"data-([0-9a-f]{12})-(\d{5,})(?:-\d+)?\.safetensors")
_INDEX_NAME = re.compile(r"index-([0-9a-f]{12})-(\d{5,})")
_LEASE_NAME = re.compile(r"save-([0-9a-f]{12})\.lease")
_TEMPORARY_NAME = re.compile(re.escape(MANIFEST) + r"(?:\.[0-9a-f]{12})?\.tmp")

checksum = xxhash.xxh3_64_intdigest


def data_name(save_id: str, rank: int, index: int | None = None) -> str:
    """The name of a data file; `index` tells the files of one rank apart if it writes several.

    >>> data_name("0123456789ab", 3)
    'data-0123456789ab-00003.safetensors'
    """
    suffix = "" if index is None else f"-{index}"
    return f"data-{save_id}-{rank:05d}{suffix}.safetensors"


def adopted_name(save_id: str, name: str) -> str:
    """The name, in this save, of a data file of another one: the same on all ranks that use some of it.

    >>> adopted_name("0123456789ab", "data-ba9876543210-00003.safetensors")
    'data-0123456789ab-00000-8360246759084738366.safetensors'
    """
    return data_name(save_id, 0, checksum(name.encode()))


def index_name(save_id: str, rank: int) -> str:
    """The name of the index of a rank.

    >>> index_name("0123456789ab", 3)
    'index-0123456789ab-00003'
    """
    return f"index-{save_id}-{rank:05d}"


def lease_name(save_id: str) -> str:
    """The name of the file that is there while a save is under way.

    >>> lease_name("0123456789ab")
    'save-0123456789ab.lease'
    """
    return f"save-{save_id}.lease"


def save_of(name: str) -> str | None:
    """The id of the save that a file belongs to; None if it is of another kind.

    >>> save_of("data-0123456789ab-00003.safetensors"), save_of("notes.txt")
    ('0123456789ab', None)
    """
    match = _DATA_NAME.fullmatch(name) or _INDEX_NAME.fullmatch(name) or _LEASE_NAME.fullmatch(name)
    return None if match is None else match[1]


def is_temporary(name: str) -> bool:
    """Whether this is a manifest that was not renamed to its final name, because its save did not finish."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def is_file_of_save(name: str, save_id: str, rank: int) -> bool:
    """Whether a file is one that this rank wrote in this save."""
    match = _DATA_NAME.fullmatch(name) or _INDEX_NAME.fullmatch(name)
    return match is not None and match[1] == save_id and int(match[2]) == rank


def chunk_suffix(offsets: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """What follows a tensor's name in the name that its data file has for a chunk: the slice, unless it is all of it.

    >>> chunk_suffix((0, 0), (4, 4), (4, 4)), chunk_suffix((2, 0), (2, 4), (4, 4))
    ('', '[2:4,0:4]')
    """
    if lengths == shape:
        return ""
    return f"[{','.join([f'{o}:{o + n}' for o, n in zip(offsets, lengths, strict=True)])}]"


def block_of(lengths: tuple[int, ...], itemsize: int) -> int:
    """How many bytes of a chunk have one checksum: few if its rows are long, so that a part of each can be read.

    >>> block_of((1024, 1024), 4), block_of((1024, 65536), 4)
    (262144, 4096)
    """
    if len(lengths) > 1 and lengths[0] > 1 and prod(lengths[1:]) * itemsize >= _LONG_ROW:
        return _SMALL_BLOCK
    return BLOCK


FRAME: Final = 1 << 20  # bytes of a chunk that are compressed together: what has to be read for any of them
LEVEL: Final = 3
_local = threading.local()  # two threads must not use one compressor at once


def encode_frame(data: memoryview, itemsize: int) -> bytes:
    """A block as it is stored.

    >>> frame = encode_frame(memoryview(bytes(8000)), 4)
    >>> len(frame) < 100, decode_frame(frame, 8000, 4) == bytes(8000)
    (True, True)
    """
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(LEVEL)
    shuffled = np.frombuffer(data, np.uint8)
    if itemsize > 1:
        shuffled = np.ascontiguousarray(shuffled.reshape(-1, itemsize).T)
    frame: bytes = compressor.compress(shuffled.reshape(-1).data)
    return frame if len(frame) < len(data) else bytes(data)


def decode_frame(frame: memoryview | bytes, nbytes: int, itemsize: int) -> bytes | memoryview:
    """The `nbytes` of a block, from how it is stored."""
    if len(frame) == nbytes:
        return frame
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        # A frame may say that it is larger than its block: then it is damaged.
        with decompressor.stream_reader(frame) as reader:
            shuffled = reader.read(nbytes + 1)
    except zstandard.ZstdError as error:
        raise CheckpointCorruptError(f"a compressed block cannot be decompressed: {error}") from error
    if len(shuffled) != nbytes:
        raise CheckpointCorruptError(f"a compressed block has {len(shuffled)} bytes or more instead of {nbytes}")
    if itemsize == 1:
        return bytes(shuffled)
    return np.ascontiguousarray(np.frombuffer(shuffled, np.uint8).reshape(itemsize, -1).T).reshape(-1).data


# ------------------------------------------------------------------ dtypes


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
