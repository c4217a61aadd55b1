"""Checkpoints in this process's memory, for tests and for handing state over without a disk."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint.stores.base import ReadFile, Store, WriteFile


class MemoryStore(Store):
    """A dict of files.  All ranks that use one must be threads of one process, or there must be one rank.

    >>> store = MemoryStore()
    >>> store.publish("greeting", b"hello", durable=True)
    >>> store.names()
    ['greeting']
    """

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    @property
    def location(self) -> str:
        return f"memory:{id(self):x}"

    def prepare(self) -> None:
        """Nothing is needed."""

    def names(self) -> list[str]:
        return list(self.files)

    def create(self, name: str, size: int) -> WriteFile:
        if name in self.files:
            raise FileExistsError(f"{name} exists already in {self.location}")
        self.files[name] = bytearray(size)
        return _MemoryFile(self.files[name], name)

    def open(self, name: str) -> ReadFile:
        try:
            return _MemoryFile(self.files[name], name)
        except KeyError:
            raise FileNotFoundError(f"there is no {name} in {self.location}") from None

    def publish(self, name: str, data: bytes | memoryview, *, durable: bool) -> None:
        self.files[name] = bytearray(data)

    def delete(self, name: str) -> None:
        self.files.pop(name, None)


class _MemoryFile(WriteFile, ReadFile):
    def __init__(self, data: bytearray, name: str) -> None:
        self._data = data
        self._name = name

    @property
    def size(self) -> int:
        return len(self._data)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self._data[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            piece = self._data[offset : offset + len(buffer)]
            if len(piece) < len(buffer):
                raise EOFError(f"{self._name} ends at byte {len(self._data)}; more was expected")
            buffer[:] = piece
            offset += len(buffer)

    def sync(self) -> None:
        """Nothing survives this process."""

    def close(self) -> None:
        """Nothing to release."""
