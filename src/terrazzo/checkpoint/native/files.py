"""An open data file, checked against what the manifest says of it."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.manifest import FileEntry
from terrazzo.checkpoint.stores.base import ReadFile, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError


class DataFile:
    """A data file whose size, and header if `verify`, are those that were written."""

    def __init__(self, store: Store, entry: FileEntry, *, verify: bool) -> None:
        self.name = f"{store.location}/{entry.name}"
        try:
            self._file: ReadFile = store.open(entry.name)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.name} is gone, though the checkpoint's manifest names it") from error
        try:
            if self._file.size != entry.size:
                raise CheckpointCorruptError(
                    f"{self.name} has {self._file.size} bytes, it was written with {entry.size}"
                )
            if verify:
                header = bytearray(entry.header_size)
                self._file.read_into(0, [memoryview(header)])
                if checksum(header) != entry.header_sum:
                    raise CheckpointCorruptError(f"{self.name}: the header is not what was saved; the file is damaged")
        except BaseException:
            self._file.close()
            raise

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        try:
            self._file.read_into(offset, buffers)
        except EOFError as error:
            raise CheckpointCorruptError(f"{self.name} is shorter than the checkpoint says: {error}") from error

    def close(self) -> None:
        """Release the file."""
        self._file.close()
