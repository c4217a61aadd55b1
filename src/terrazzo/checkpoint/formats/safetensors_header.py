"""The header of safetensors data: the tensors and the positions of their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
import torch

from terrazzo.checkpoint.formats.table import chunk_at
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}
_LONGEST: Final = 100 << 20  # the safetensors library's own limit


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors in a window of a file."""

    window: Window
    tensors: dict[str, StoredChunk]
    metadata: dict[str, str]


class _Described(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def is_start_of_safetensors(data: bytes, size: int) -> bool:
    """Whether a file of `size` bytes that begins with `data` can be safetensors data."""
    return len(data) > 8 and data[8:9] == b"{" and 2 <= int.from_bytes(data[:8], "little") <= min(_LONGEST, size - 8)


def read_header(window: Window) -> Header:
    """The header at the beginning of a window: eight bytes of length, JSON, then the tensors' bytes."""
    length = int.from_bytes(window.read(0, 8), "little") if window.length >= 8 else 0
    if not 2 <= length <= min(_LONGEST, window.length - 8):
        raise CheckpointFormatError(f"{window.where}: neither a file of torch.save nor of safetensors")
    try:
        entries = msgspec.json.decode(window.read(8, length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", b"null"), type=dict[str, str] | None) or {}
        described = {name: msgspec.json.decode(entry, type=_Described) for name, entry in entries.items()}
        tensors = {name: _tensor(name, entry, 8 + length, window) for name, entry in described.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{window.where}: a damaged safetensors header ({error})") from error
    return Header(window, tensors, metadata)


def _tensor(name: str, entry: _Described, data: int, window: Window) -> StoredChunk:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointFormatError(f"a tensor of the unknown type {entry.dtype}")
    (first, last), shape = entry.data_offsets, entry.shape
    if min((first, *shape)) < 0 or last - first != prod(shape) * dtype.itemsize or last > window.length - data:
        raise ValueError(f"a tensor of shape {shape} in the bytes {first} to {last}")
    return chunk_at(name, window.file, window.start + data + first, dtype, shape)
