"""Checkpoints in a folder of a file system.

What each step is there for:
- data files are created under names of their own save, so an older checkpoint's files are never touched;
- each data file is made durable by its writer, and the folder before the manifest takes its name: a manifest that
  survives a loss of power never refers to data that did not;
- the manifest is written beside its final name, made durable, renamed over it, and the folder made durable again: a
  reader sees the old one or the new one, and the new one is there for good when `publish` returns;
- the folders above a new checkpoint folder are made durable too, or the whole folder could vanish.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.stores.base import ReadFile, Store, WriteFile

_MAX_BUFFERS: Final = 1024  # IOV_MAX on Linux
_MAX_BYTES: Final = 1 << 30  # the kernel moves at most 2 GiB a call
_WRITE_BEHIND: Final = 8 << 20


class LocalStore(Store):
    """A folder.

    `system` has the functions of the `os` module that files are touched with; tests put a failing one in its place.
    """

    def __init__(self, path: str | os.PathLike[str], system: Any = os) -> None:
        self._path = Path(path)
        self._os = system

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self._path,)  # modules cannot be pickled

    @property
    def location(self) -> str:
        return str(self._path)

    def prepare(self) -> None:
        new = []
        folder = self._path.absolute()
        while not folder.is_dir():
            new.append(folder)
            folder = folder.parent
        for folder in reversed(new):
            try:
                self._os.mkdir(folder)
            except FileExistsError:  # another rank was faster
                if not folder.is_dir():
                    raise
            self.sync_folder(folder.parent)

    def names(self) -> list[str]:
        try:
            return self._os.listdir(self._path)
        except FileNotFoundError:
            return []

    def create(self, name: str, size: int) -> WriteFile:
        path = self._path / name
        fd = self._os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return _LocalWriteFile(self._os, fd, str(path))

    def open(self, name: str) -> ReadFile:
        path = self._path / name
        return _LocalReadFile(self._os, self._os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path))

    def publish(self, name: str, data: bytes | memoryview, *, durable: bool) -> None:
        temporary = name + ".tmp"
        self.delete(temporary)
        file = self.create(temporary, len(data))
        try:
            file.write(0, [memoryview(data)])
            if durable:
                file.sync()
        finally:
            file.close()
        if durable:
            self.sync_folder(self._path)
        self._os.replace(self._path / temporary, self._path / name)
        if durable:
            self.sync_folder(self._path)

    def delete(self, name: str) -> None:
        try:
            self._os.unlink(self._path / name)
        except FileNotFoundError:
            pass

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` survive a loss of power."""
        fd = self._os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
                raise
        finally:
            self._os.close(fd)


class _LocalWriteFile(WriteFile):
    def __init__(self, system: Any, fd: int, path: str) -> None:
        self._os = system
        self._fd = fd
        self._path = path
        self._behind = 0  # bytes written since the kernel was last asked to begin with the disk
        self._lock = threading.Lock()

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for group in _groups(buffers):
            total = sum(map(len, group))
            written = self._pwritev(group, offset)
            done = written
            while done < total:  # a short write: carry on until the kernel says why
                if written == 0:
                    raise OSError(errno.EIO, "the file system accepted no bytes", self._path)
                group = _without_first(group, written)
                written = self._pwritev(group, offset + done)
                done += written
            offset += total
            self._write_behind(total)

    def _write_behind(self, written: int) -> None:
        with self._lock:
            self._behind += written
            if self._behind < _WRITE_BEHIND:
                return
            self._behind = 0
        _start_writing_back(self._fd)

    def _pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            written: int = self._os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        return written

    def sync(self) -> None:
        try:
            self._os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._os.close(fd)


class _LocalReadFile(ReadFile):
    def __init__(self, system: Any, fd: int, path: str) -> None:
        self._os = system
        self._fd = fd
        self._path = path
        self._size: int = system.fstat(fd).st_size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for group in _groups(buffers):
            while group:
                try:
                    got = self._os.preadv(self._fd, group, offset)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, self._path) from error
                if got == 0:
                    raise EOFError(f"{self._path} ends at byte {offset}; more was expected")
                offset += got
                group = _without_first(group, got)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._os.close(fd)


def _groups(buffers: Sequence[memoryview]) -> list[Sequence[memoryview]]:
    """The buffers in groups that one system call can take."""
    if len(buffers) <= _MAX_BUFFERS and (together := sum(map(len, buffers))) <= _MAX_BYTES:
        return [buffers] if together else []
    groups: list[Sequence[memoryview]] = []
    group: list[memoryview] = []
    total = 0
    for buffer in buffers:
        for start in range(0, len(buffer), _MAX_BYTES):
            piece = buffer[start : start + _MAX_BYTES]
            if group and (total + len(piece) > _MAX_BYTES or len(group) == _MAX_BUFFERS):
                groups.append(group)
                group, total = [], 0
            group.append(piece)
            total += len(piece)
    if group:
        groups.append(group)
    return groups


def _without_first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The buffers less their first `nbytes`."""
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= len(buffer)
    return []


def _start_writing_back(fd: int) -> None:
    """Ask the kernel to begin writing the file to the disk, so that the fsync at the end has less to wait for."""
    function = _sync_file_range()
    if function is not None:
        # 2: SYNC_FILE_RANGE_WRITE, of all there is.  It is a hint, failure is harmless.
        function(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)
