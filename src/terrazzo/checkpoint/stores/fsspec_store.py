"""Checkpoints in file systems of `fsspec`, if `fsspec` and the file system's package are installed.

`fsspec` cannot compare and replace a file atomically. So a job that replaces the root writes a temporary file beside it
first, and then lists those of other jobs. Of two jobs at least one sees the other's, takes its own away, and waits; so
between the comparison and the replacement of one job there is none of another job. A job that needs longer than
`_PATIENCE` gives up, and one that is seen for longer counts as dead: only if a process stands still for so long while
the file system moves its file, it may replace a root that another job has committed meanwhile. Two jobs at once may
both get an error. For S3, Google Cloud and Azure use `ObjectStore`, which replaces atomically.

A file that may exist is written under a temporary name and moved. Where the file system renames, readers get the old
file or the new one. Where it copies instead, or cannot move over an existing file, a process that is killed at that
moment can leave a file that is cut off, but then the temporary one has all of it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from terrazzo.checkpoint.stores.base import (
    LARGEST,
    LEASE_SECONDS,
    TEMPORARY,
    Absent,
    Capabilities,
    Entry,
    GrowingUpload,
    MemoryUpload,
    Request,
    Store,
    Upload,
    Version,
    check_size,
    version_of,
)
from terrazzo.errors import CheckpointValueError, ConflictError

_PATIENCE: Final = 60.0  # seconds after which a job that replaces a file counts as dead
_TIMES: Final = ("mtime", "LastModified", "last_modified", "created")  # file systems use different names


class FsspecStore(Store):
    """A folder of an `fsspec` file system, which is given by the URL or as `fs`.

    `settings` go to the file system (`fsspec.url_to_fs`).
    """

    caps = Capabilities(in_place=False, file_bytes=64 << 20, request_bytes=4 << 20, gap=256 << 10)

    def __init__(self, url: str, fs: Any = None, *, lease_seconds: float = LEASE_SECONDS, **settings: Any) -> None:
        self._url = url.rstrip("/")
        self.lease_seconds = lease_seconds
        scheme, _, folder = self._url.partition("://")
        folder = folder or self._url
        if fs is None:
            try:
                import fsspec  # type: ignore[import-untyped]  # it has no types

                fs, folder = fsspec.url_to_fs(self._url, **settings)
            except (ImportError, ValueError) as error:  # ValueError: fsspec knows no such scheme
                raise CheckpointValueError(
                    f"{self._url!r} cannot be used: {error}. There are s3://, gs://, az:// and file://; for others "
                    f"install fsspec and its package for {scheme}://"
                ) from error
        self._fs: Any = fs
        self._folder: str = folder.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStore, (self._url, self._fs)

    @property
    def location(self) -> str:
        return self._url

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def prepare(self) -> None:
        self._fs.makedirs(self._folder, exist_ok=True)

    def upload(self, key: str, size: int) -> Upload:
        if self.exists(key):
            raise FileExistsError(f"{self._url}/{key} exists already")
        return MemoryUpload(size, lambda data: self._fs.pipe_file(self._path(key), bytes(data)))

    def stream(self, key: str) -> Upload:
        def begin() -> _Opened:
            self._remove_left(key)
            return _Opened(self, f".{key}.{uuid.uuid4().hex[:12]}{TEMPORARY}", key)

        return GrowingUpload(lambda data: self.put(key, data), begin)

    def folders(self) -> Sequence[str]:
        return [self._name(info) for info in self._listing() if info["type"] == "directory"]

    def is_link(self, name: str) -> bool:
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return False
        return bool(info.get("islink")) or info["type"] == "link"

    def beneath(self, name: str) -> FsspecStore:
        return FsspecStore(f"{self._url}/{name}", self._fs, lease_seconds=self.lease_seconds)

    def remove_folder(self, name: str) -> None:
        with suppress(OSError):  # it is not empty, or does not exist any more
            self._fs.rmdir(self._path(name))

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            size = request.size
            if size:
                data = memoryview(
                    self._fs.cat_file(self._path(request.key), start=request.start, end=request.start + size)
                )
                if len(data) < size:
                    raise EOFError(f"{self._url}/{request.key} ends early; {size - len(data)} more bytes were expected")
                position = 0
                for buffer in request.buffers:
                    buffer[:] = data[position : position + len(buffer)]
                    position += len(buffer)
            yield request

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes, Version]:
        check_size(self, key, self.stat(key).size, most)
        data = bytes(self._fs.cat_file(self._path(key)))
        return data, version_of(data)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        if not data:  # it cannot be cut off
            self._check_version(key, only_if)
            self._fs.pipe_file(self._path(key), b"")
            return version_of(data)
        temporary, begun = self._begun(key, bytes(data), alone=only_if is not None)
        try:
            self._check_version(key, only_if)
            if only_if is not None and time.monotonic() - begun > _PATIENCE / 2:
                raise ConflictError(
                    f"{self._url}/{key} was not replaced: it took more than {_PATIENCE / 2:.0f} seconds, after which "
                    "another save may count this one as dead; save again"
                )
        except BaseException:
            self.delete([temporary])
            raise
        try:
            self._move(temporary, key)
        except Exception:  # of whatever type in each file system
            self._fs.pipe_file(self._path(key), bytes(data))  # raises if that is not the cause
            self.delete([temporary])
        if only_if is not None and self.present(key) != version_of(data):
            raise ConflictError(f"{self._url}/{key} was replaced by another save at the same time")
        return version_of(data)

    def _begun(self, key: str, data: bytes, *, alone: bool) -> tuple[str, float]:
        """The name of a temporary file with these bytes that is to replace another file, and when it was begun.

        With `alone`, there is none of another process: it waits for those of others, except those that have been there
        for so long that they were left by a process that was killed.
        """
        seen: dict[str, float] = {}
        end = time.monotonic() + 2 * _PATIENCE
        while True:
            temporary, begun = f"{key}.{uuid.uuid4().hex[:12]}{TEMPORARY}", time.monotonic()
            self._fs.pipe_file(self._path(temporary), data)
            there = self.list(f"{key}.") if alone else []
            dates = {entry.key: entry.modified for entry in there if entry.key.endswith(TEMPORARY)}
            own = dates.pop(temporary, 0)
            others = [
                name
                for name, date in dates.items()
                if begun - seen.setdefault(name, begun) < _PATIENCE and not 0 < date < own - _PATIENCE
            ]
            if not others:
                return temporary, begun
            self.delete([temporary])
            if time.monotonic() > end:
                raise ConflictError(f"{self._url}/{key} was not replaced, because other saves replace it; save again")
            time.sleep(random.uniform(0.05, 0.5))

    def _move(self, temporary: str, key: str) -> None:
        """Rename a file, over another one if there is one; raises if the file system cannot."""
        self._fs.mv(self._path(temporary), self._path(key))
        if self.exists(temporary):  # some file systems do nothing if the other one exists
            raise FileExistsError(f"{self._url}/{key} cannot be replaced: remove it, or use another name")

    def list(self, prefix: str = "") -> list[Entry]:
        names = [(self._name(info), info) for info in self._listing() if info["type"] == "file"]
        return [self._entry(name, info) for name, info in names if name.startswith(prefix)]

    def _listing(self) -> Sequence[dict[str, Any]]:
        self._fs.invalidate_cache(self._folder)
        try:
            found: Sequence[dict[str, Any]] = self._fs.ls(self._folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [info for info in found if info["name"].strip("/") != self._folder.strip("/")]  # of a file, itself

    @staticmethod
    def _name(info: dict[str, Any]) -> str:
        name: str = info["name"]
        return name.rstrip("/").rsplit("/", 1)[-1]

    def stat(self, key: str) -> Entry:
        self._fs.invalidate_cache(self._folder)
        info = self._fs.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._url}/{key} is not a file")
        return self._entry(key, info)

    def _entry(self, key: str, info: dict[str, Any]) -> Entry:
        modified = next((info[name] for name in _TIMES if name in info), 0)
        return Entry(key, info["size"], modified if isinstance(modified, (int, float)) else modified.timestamp())

    def lease_ended(self, key: str, last_sign: float) -> bool:
        return last_sign > 0 and super().lease_ended(key, last_sign)  # some file systems give no dates

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))


class _Opened(Upload):
    """A temporary file that is renamed when it is complete."""

    def __init__(self, store: FsspecStore, temporary: str, key: str) -> None:
        self._store = store
        self._temporary = temporary
        self._key = key
        self._file = store._fs.open(store._path(temporary), "wb")

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for data in buffers:
            self._file.write(data)

    def finish(self) -> None:
        self._file.close()
        self._store._move(self._temporary, self._key)

    def abort(self) -> None:
        self._file.close()
        self._store.delete([self._temporary])
