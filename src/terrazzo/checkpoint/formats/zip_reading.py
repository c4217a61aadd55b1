"""Find the records of an uncompressed zip archive, which may be a part of a larger file.

`torch.save` writes zip archives; a file of a torch DCP checkpoint has one after the other. Only the directory at an
archive's end is read here, not the records' contents.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any, Final

from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError

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
            if header[0] != b"PK\x03\x04":
                raise CheckpointCorruptError(f"{self._window.where}: the record {name!r} is not where it should be")
            start = record.header_offset + _LOCAL.size + header[9] + header[10]
            if start + record.file_size > self._window.length:
                raise CheckpointCorruptError(f"{self._window.where}: the record {name!r} is cut off")
            self._starts[name] = start
        return start

    def read(self, name: str) -> bytes:
        """The contents of a record, with its checksum verified."""
        record = self.records.get(name)
        if record is None:
            raise CheckpointFormatError(
                f"{self._window.where}: a zip archive, but not of torch.save: it has no {name!r}"
            )
        data = self._window.read(self.start_of(name), record.file_size)
        if record.CRC and zlib.crc32(data) != record.CRC:
            raise CheckpointCorruptError(
                f"{self._window.where}: the bytes of the record {name!r} are not the bytes that were written (CRC-32)"
            )
        return data
