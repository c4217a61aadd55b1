"""Checkpoints in this process's memory, for tests, and to pass state on without a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    LARGEST,
    Absent,
    Capabilities,
    Entry,
    MemoryUpload,
    Request,
    Store,
    Upload,
    Version,
    check_size,
)
from terrazzo.errors import ConflictError


class MemoryStore(Store):
    """A dict of files. All ranks that use it must be threads of one process.

    >>> store = MemoryStore()
    >>> version = store.put("greeting", b"hello")
    >>> [entry.key for entry in store.list()]
    ['greeting']
    """

    def __init__(self, caps: Capabilities | None = None) -> None:
        self.caps = caps or Capabilities()
        self._files: dict[str, tuple[bytearray, int, float]] = {}  # bytes, number of the version, time
        self._folders: dict[str, MemoryStore] = {}
        self._writes = 0
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        return f"memory:{id(self):x}"

    def upload(self, key: str, size: int) -> Upload:
        if key in self._files:
            raise FileExistsError(f"{key} exists already in {self.location}")
        return MemoryUpload(size, lambda data: self.put(key, data))

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            data, position = self._file(request.key), request.start
            for buffer in request.buffers:
                piece = data[position : position + len(buffer)]
                if len(piece) < len(buffer):
                    raise EOFError(f"{request.key} is too short: it ends at byte {len(data)}")
                buffer[:] = piece
                position += len(buffer)
            yield request

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes, Version]:
        with self._lock:
            check_size(self, key, len(self._file(key)), most)
            data, number, _ = self._files[key]
            return bytes(data), Version(str(number))

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        with self._lock:
            present = Version(str(self._files[key][1])) if key in self._files else ABSENT
            if only_if is not None and present != only_if:
                raise ConflictError(f"{self.location}: {key} was replaced by another save")
            self._writes += 1
            self._files[key] = bytearray(data), self._writes, time.time()
            return Version(str(self._writes))

    def now(self) -> float:
        return time.time()

    def list(self, prefix: str = "") -> list[Entry]:
        with self._lock:
            return [
                Entry(key, len(data), modified)
                for key, (data, _, modified) in self._files.items()
                if key.startswith(prefix)
            ]

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._files.pop(key, None)

    def delete_if(self, key: str, version: Version) -> None:
        with self._lock:
            if key not in self._files or Version(str(self._files[key][1])) != version:
                raise self.conflict(key)
            del self._files[key]

    def folders(self) -> Sequence[str]:
        return [name for name, store in self._folders.items() if store.list() or store.folders()]

    def beneath(self, name: str) -> MemoryStore:
        with self._lock:
            return self._folders.setdefault(name, MemoryStore(self.caps))

    def _file(self, key: str) -> bytearray:
        try:
            return self._files[key][0]
        except KeyError:
            raise FileNotFoundError(f"there is no {key} in {self.location}") from None
