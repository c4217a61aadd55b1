"""Find the records of an uncompressed zip archive, which may be a part of a larger file.

`torch.save` writes zip archives; a file of a torch DCP checkpoint has one after the other. Only the directory at an
archive's end is read here, not the records' contents.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.stores.base import Request, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError

_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64: Final = struct.Struct("<4sLQL")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LARGE: Final = 0xFFFFFFFF
_WHOLE: Final = 64 << 10  # archives up to this size are read in one go


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its size, its CRC-32 (0 if it was not computed), and the offset of its local header."""

    size: int
    crc: int
    header: int


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
        request = Request(self.file.name, self.start + offset, [memoryview(data)])
        try:
            for _ in self.store.read([request], in_flight_bytes=0):
                pass
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.where}: the file is missing") from error
        except EOFError as error:
            raise CheckpointCorruptError(f"{self.where}: cut off ({error})") from error
        return bytes(data)


class ZipDirectory:
    """The records of one archive by name, without the folder that all names of a `torch.save` archive begin with."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._starts: dict[str, int] = {}
        try:
            self.records = self._read_directory()
        except (struct.error, IndexError, ValueError) as error:
            raise CheckpointCorruptError(f"{window.where}: damaged zip directory ({error})") from error

    def start_of(self, name: str) -> int:
        """The offset of a record's contents, after its local header, which has its own length fields."""
        start = self._starts.get(name)
        if start is None:
            record = self.records[name]
            header = _LOCAL.unpack(self._window.read(record.header, _LOCAL.size))
            if header[0] != b"PK\x03\x04":
                raise CheckpointCorruptError(f"{self._window.where}: the record {name!r} is not where it should be")
            start = record.header + _LOCAL.size + header[9] + header[10]
            if start + record.size > self._window.length:
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
        data = self._window.read(self.start_of(name), record.size)
        if record.crc and zlib.crc32(data) != record.crc:
            raise CheckpointCorruptError(
                f"{self._window.where}: the bytes of the record {name!r} are not the bytes that were written (CRC-32)"
            )
        return data

    def _read_directory(self) -> dict[str, Record]:
        count, size, offset = self._find_directory()
        data = self._window.read(offset, size)
        records: dict[str, Record] = {}
        position = 0
        for _ in range(count):
            fields = _CENTRAL.unpack_from(data, position)
            if fields[0] != b"PK\x01\x02":
                raise ValueError("an entry has no signature")
            method, crc, packed, unpacked = fields[4], fields[7], fields[8], fields[9]
            name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
            position += _CENTRAL.size
            name = data[position : position + name_length].decode()
            extra = data[position + name_length : position + name_length + extra_length]
            position += name_length + extra_length + comment_length
            unpacked, packed, header = _large_fields(extra, unpacked, packed, header)
            if method != 0 or packed != unpacked:
                raise CheckpointFormatError(
                    f"{self._window.where}: the record {name!r} is compressed; torch.save does not do that"
                )
            records[name.partition("/")[2] or name] = Record(unpacked, crc, header)
        return records

    def _find_directory(self) -> tuple[int, int, int]:
        """Number of entries, size and offset of the directory."""
        length = self._window.length
        tail_length = min(length, _END.size + _LOCATOR64.size + 0xFFFF)
        tail = self._window.read(length - tail_length, tail_length)
        end = tail.rfind(b"PK\x05\x06")
        if end < 0:
            raise CheckpointCorruptError(f"{self._window.where}: the zip directory at its end is missing; cut off?")
        _, _, _, _, count, size, offset, _ = _END.unpack_from(tail, end)
        locator = end - _LOCATOR64.size
        if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
            where64 = _LOCATOR64.unpack_from(tail, locator)[2]
            fields = _END64.unpack(self._window.read(where64, _END64.size))
            if fields[0] != b"PK\x06\x06":
                raise ValueError("the 64-bit end record has no signature")
            count, size, offset = fields[7], fields[8], fields[9]
        return count, size, offset


def _large_fields(extra: bytes, unpacked: int, packed: int, header: int) -> tuple[int, int, int]:
    """The 64-bit values of fields that refer to the extra field."""
    values = [unpacked, packed, header]
    position = 0
    while position + 4 <= len(extra) and _LARGE in values:
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            at = position + 4
            for i, value in enumerate(values):
                if value == _LARGE:
                    (values[i],) = struct.unpack_from("<Q", extra, at)
                    at += 8
            break
        position += 4 + length
    return values[0], values[1], values[2]
