"""A part of a file, and what it is: an archive of `torch.save`, or safetensors data; what it holds; is it whole?

`torch.save` writes uncompressed zip archives; a file of a torch DCP checkpoint has one after the other. Only the
directory at an archive's end, or the header at the beginning of safetensors data, is read here, not the contents.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import torch

from terrazzo.checkpoint.formats.format import Checked
from terrazzo.checkpoint.formats.stored import chunk_at, file_at
from terrazzo.checkpoint.native.format import STORED
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.native.tensors import dtype_from_name
from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.stores.base import LARGEST
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_WHOLE: Final = 64 << 10  # archives up to this size are read in one go


class Window:
    """A part of a file. A small one is read as a whole, instead of by many small reads."""

    def __init__(
        self, store: Store, file: FileEntry, start: int = 0, length: int | None = None, what: str | None = None
    ) -> None:
        self.where = f"{store.location}/{file.name}" + (f", {what}" if what else "")
        length = file.size - start if length is None else length
        if start < 0 or length < 0 or start + length > file.size:
            raise CheckpointCorruptError(
                f"{self.where}: bytes {start} to {start + length} are needed, but the file has only {file.size}"
            )
        self.store = store
        self.file = file
        self.start = start
        self.length = length
        self._whole = self._read(0, length) if length <= _WHOLE else None

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the window."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise CheckpointCorruptError(f"{self.where}: the archive refers to bytes outside of itself")
        return self._read(offset, length) if self._whole is None else self._whole[offset : offset + length]

    def _read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        try:
            self.store.read_at(self.file.name, self.start + offset, memoryview(data))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.where}: the file is missing") from error
        except EOFError as error:
            raise CheckpointCorruptError(f"{self.where}: cut off ({error})") from error
        return bytes(data)


class WindowStream(io.RawIOBase):
    """A window as a file."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._window.length}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._window.length - self._position), 0)
        memoryview(buffer)[:count] = self._window.read(self._position, count)
        self._position += count
        return count


class PickleStream(io.BufferedReader):
    """A window with pickles as a file: a length or a line in a pickle asks for no more memory than there are bytes."""

    def __init__(self, window: Window) -> None:
        super().__init__(WindowStream(window))
        self._length = window.length

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        return super().read(size if 0 <= size <= _WHOLE else min(size, LARGEST, self._length - self.tell()))

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(_WHOLE)


class ZipDirectory:
    """The records of one archive by name, without the folder that all names of a `torch.save` archive begin with."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._starts: dict[str, int] = {}
        self.records: dict[str, zipfile.ZipInfo] = {}
        try:
            with zipfile.ZipFile(io.BufferedReader(WindowStream(window))) as archive:
                found = archive.infolist()
        except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OSError) as error:
            raise CheckpointCorruptError(f"{window.where}: a damaged zip directory, or cut off ({error})") from error
        for record in found:
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise CheckpointFormatError(
                    f"{window.where}: the record {record.filename!r} is compressed; torch.save does not do that"
                )
            self.records[record.filename.partition("/")[2] or record.filename] = record

    def start_of(self, name: str) -> int:
        """The offset of a record's contents, after its local header, which has its own length fields."""
        start = self._starts.get(name)
        if start is None:
            record = self.records[name]
            header = _LOCAL.unpack(self._window.read(record.header_offset, _LOCAL.size))
            if header[0] != _ZIP:
                raise CheckpointCorruptError(f"{self._window.where}: the record {name!r} is not where it should be")
            start = record.header_offset + _LOCAL.size + header[9] + header[10]
            if start + record.file_size > self._window.length:
                raise CheckpointCorruptError(f"{self._window.where}: the record {name!r} is cut off")
            self._starts[name] = start
        return start

    def extent(self, key: str) -> tuple[int, int, int]:
        """Where a storage begins, its size and its CRC-32."""
        record = self.records.get(f"data/{key}")
        if record is None:
            raise CheckpointCorruptError(f"{self._window.where}: the storage {key!r} is missing from the archive")
        return self.start_of(f"data/{key}"), record.file_size, record.CRC

    def read(self, name: str) -> bytes:
        """The contents of a record, with its checksum verified."""
        record = self.records.get(name)
        if record is None:
            raise CheckpointFormatError(
                f"{self._window.where}: a zip archive, but not of torch.save: it has no {name!r}"
            )
        if record.file_size > LARGEST:
            raise CheckpointCorruptError(
                f"{self._window.where}: the record {name!r} has {record.file_size} bytes, more than the {LARGEST} that "
                "such a record may have, so it is not read"
            )
        data = self._window.read(self.start_of(name), record.file_size)
        if record.CRC and zlib.crc32(data) != record.CRC:
            raise CheckpointCorruptError(
                f"{self._window.where}: the bytes of the record {name!r} are not the bytes that were written (CRC-32)"
            )
        return data


# ------------------------------------------------------------------ what a window has


_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_PROTOCOLS: Final = (b"\x02", b"\x03", b"\x04", b"\x05")
_MAGIC_NUMBER: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of torch.save's number, after its protocol
START: Final = 32


def is_zip(window: Window) -> bool:
    """Whether a window begins like a zip archive."""
    return window.read(0, min(4, window.length)) == _ZIP


def is_archive(window: Window) -> bool:
    """Whether a window begins like a file of `torch.save`."""
    return is_start_of_archive(window.read(0, min(START, window.length)))


def is_start_of_archive(start: bytes) -> bool:
    """Whether bytes are the beginning of what `torch.save` writes, given `START` of them or all there are.

    A pickle's first byte alone says nothing: it may be that of a length, with which safetensors begins.
    """
    return start.startswith(_ZIP) or (start[:1] == _PICKLE and start[1:2] in _PROTOCOLS and _MAGIC_NUMBER in start)


# ------------------------------------------------------------------ the header of safetensors data


_DTYPES: Final = {
    **{stored.code: dtype_from_name(name) for name, stored in STORED.items() if stored.added is None},
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


# ------------------------------------------------------------------ whether a file is whole


_PIECE: Final = 4 << 20  # bytes
_SEAL_IT: Final = "`terrazzo seal` writes checksums beside them"
NO_SUMS: Final = f"safetensors files have no checksums, so only their structure was checked; {_SEAL_IT}"
_OLD: Final = f"some values are stored without checksums, and were not read; {_SEAL_IT}"


class Value(NamedTuple):
    """A value in a file that has several, or all that is in a file."""

    name: str | None = None
    start: int = 0
    length: int | None = None
    is_tensor: bool = True


_ALL: Final = Value()


def check_files(store: Store, keys: Iterable[str], progress: Callable[[int], None]) -> Checked:
    """What is found in files: archives of `torch.save`, or safetensors data."""
    checked = Checked()
    for key in keys:
        check_file(checked, store, key, progress)
    return checked


def check_file(checked: Checked, store: Store, key: str, progress: Callable[[int], None], value: Value = _ALL) -> None:
    """Add the damage of a file, or of a value in it: an archive of `torch.save`, or safetensors data."""
    try:
        file = file_at(store, key)
        window = Window(store, file, value.start, value.length)
        if is_zip(window):
            _check_records(checked, window, progress, value.name)
        elif is_archive(window) or not value.is_tensor:
            checked.unchecked = _OLD
        else:
            _check_header(checked, Window(store, file, value.start))
            checked.unchecked = NO_SUMS
    except (CheckpointError, OSError) as error:
        checked.damage.append(Damage(key, str(error), value.name))


def _check_records(checked: Checked, window: Window, progress: Callable[[int], None], name: str | None) -> None:
    directory = ZipDirectory(window)
    for record, about in directory.records.items():
        start, crc = directory.start_of(record), 0
        for at in range(0, about.file_size, _PIECE):
            piece = window.read(start + at, min(_PIECE, about.file_size - at))
            crc = zlib.crc32(piece, crc)
            progress(len(piece))
        if about.CRC == 0 and about.file_size:
            checked.unchecked = _OLD  # written with the checksums switched off
        elif crc != about.CRC:
            first = window.start + start
            what = "not the bytes that were written"
            checked.damage.append(Damage(window.file.name, what, name or record, first, first + about.file_size))


def _check_header(checked: Checked, window: Window) -> None:
    """The tensors of a safetensors file follow one another, up to its end."""
    header = read_header(window)
    end = window.start + 8 + int.from_bytes(window.read(0, 8), "little")
    for chunk in sorted(header.tensors.values(), key=lambda chunk: (chunk.start, chunk.nbytes)):
        if chunk.nbytes and chunk.start != end:
            what = "overlaps another tensor" if chunk.start < end else "does not follow the tensor before it"
            checked.damage.append(Damage(window.file.name, what, chunk.name, chunk.start, chunk.start + chunk.nbytes))
        end = max(end, chunk.start + chunk.nbytes)
    if end != window.file.size:
        what = "bytes that belong to no tensor"
        checked.damage.append(Damage(window.file.name, what, None, end, window.file.size))
