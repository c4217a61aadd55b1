"""Write uncompressed zip archives in the layout of `torch.save`, one or several to a file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Final

from terrazzo.checkpoint.stores.base import Upload

ALIGNMENT: Final = 64  # of the contents, so that PyTorch can map a file into memory
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64: Final = struct.Struct("<4sLQL")
_LARGE: Final = 0xFFFFFFFF
_PLAIN_VERSION: Final = 20
_LARGE_VERSION: Final = 45
_DESCRIBED: Final = 0x08  # a record's checksum and size come after it
_DATE: Final = 0x21  # 1980-01-01: equal contents give equal archives
_TOGETHER: Final = 1 << 20  # bytes gathered before they are written


class ZipWriter:
    """One archive, which begins at `start` in a file and is written from its beginning to its end.

    `finish` writes its directory and returns where it ends.
    """

    def __init__(self, file: Upload, start: int, folder: str = "archive") -> None:
        self._file = file
        self._start = start
        self._position = start
        self._folder = folder
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0
        self._directory: list[bytes] = []

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Add a record."""
        view = memoryview(data).cast("B")
        self._append(self._header(name, len(view), zlib.crc32(view)))
        self._append(view)

    def add_pieces(self, name: str, size: int, pieces: Iterable[memoryview]) -> None:
        """Add a record from pieces; its checksum is written after it, because it is known only then.

        Each piece is written before the next is requested.
        """
        self._append(self._header(name, size, None))
        self.flush()
        crc = 0
        written = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            self._file.write(self._position, [piece])
            self._position += len(piece)
            written += len(piece)
        if written != size:
            raise ValueError(f"the record {name!r} should have {size} bytes, but got {written}")
        entry = bytearray(self._directory[-1])
        struct.pack_into("<L", entry, 16, crc)
        self._directory[-1] = bytes(entry)
        self._append(struct.pack("<4sL2Q" if size >= _LARGE else "<4s3L", b"PK\x07\x08", crc, size, size))

    def finish(self) -> int:
        """Write the directory; returns the position after it."""
        offset = self._position + self._waiting_bytes - self._start
        directory = b"".join(self._directory)
        count = len(self._directory)
        self._append(directory)
        if offset >= _LARGE or count >= 0xFFFF:
            end = offset + len(directory)
            self._append(
                _END64.pack(
                    b"PK\x06\x06", _END64.size - 12, 45, _LARGE_VERSION, 0, 0, count, count, len(directory), offset
                )
            )
            self._append(_LOCATOR64.pack(b"PK\x06\x07", 0, end, 1))
        short = min(count, 0xFFFF)
        self._append(_END.pack(b"PK\x05\x06", 0, 0, short, short, min(len(directory), _LARGE), min(offset, _LARGE), 0))
        self.flush()
        return self._position

    def _header(self, name: str, size: int, crc: int | None) -> bytes:
        """The local header of the next record, padded to align its contents. Also adds the directory entry.

        Without a checksum, checksum and size follow the contents.
        """
        path = f"{self._folder}/{name}".encode()
        offset = self._position + self._waiting_bytes - self._start
        large = size >= _LARGE
        short = min(size, _LARGE)
        version = _LARGE_VERSION if large or offset >= _LARGE else _PLAIN_VERSION
        flags = _DESCRIBED if crc is None else 0
        told = 0 if crc is None else size
        extra = struct.pack("<2H2Q", 1, 16, told, told) if large else b""
        padding = -(offset + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
        sizes64 = [value for value in (size, size, offset) if value >= _LARGE]
        central_extra = struct.pack(f"<2H{len(sizes64)}Q", 1, 8 * len(sizes64), *sizes64) if sizes64 else b""
        self._directory.append(
            _CENTRAL.pack(
                b"PK\x01\x02", version, version, flags, 0, 0, _DATE, crc or 0, short, short,
                len(path), len(central_extra), 0, 0, 0, 0, min(offset, _LARGE),
            )
            + path
            + central_extra
        )  # fmt: skip
        sizes = (short, short) if large or crc is not None else (0, 0)
        header = _LOCAL.pack(b"PK\x03\x04", version, flags, 0, 0, _DATE, crc or 0, *sizes, len(path), len(extra))
        return header + path + extra

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._waiting.append(view)
        self._waiting_bytes += len(view)
        if self._waiting_bytes >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered."""
        if self._waiting:
            self._file.write(self._position, self._waiting)
            self._position += self._waiting_bytes
            self._waiting, self._waiting_bytes = [], 0
