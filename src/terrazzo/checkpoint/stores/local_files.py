"""Open files of a folder: one that is written in pieces, one that is read in any order."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.stores.base import Upload
from terrazzo.errors import CheckpointFormatError

_MAX_BUFFERS: Final = 1024  # IOV_MAX on Linux
_MAX_BYTES: Final = 1 << 30  # the kernel moves at most 2 GiB a call
_WRITE_BEHIND: Final = 8 << 20
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
_STEP: Final = 256 << 10  # bytes that are read at once if the caller uses them then: half of a small second-level cache


class _LocalFile:
    """An open file."""

    def __init__(self, system: Any, fd: int, path: Path) -> None:
        self._os = system
        self._fd = fd
        self.path = str(path)

    def _call(self, function: str, *arguments: Any) -> Any:
        """The result of a system call on the file, whose path is in an error."""
        try:
            return getattr(self._os, function)(self._fd, *arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    def close(self) -> None:
        """Close it, once."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._os.close(fd)


class LocalUpload(_LocalFile, Upload):
    """A data file that is written under its final name. `then` is called when it is complete."""

    def __init__(self, system: Any, fd: int, path: Path, *, durable: bool) -> None:
        super().__init__(system, fd, path)
        self._durable = durable
        self.then: Callable[[], object] | None = None
        self._behind = 0  # bytes written since the kernel was last asked to start writing to the disk
        self._lock = threading.Lock()

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for group in _groups(buffers):
            self._write_behind(sum(map(len, group)))
            while group:  # after a short write, continue until the kernel returns an error
                written = self._call("pwritev", group, offset)
                if written == 0:
                    raise OSError(errno.EIO, "the file system accepted no bytes", self.path)
                offset += written
                group = _without_first(group, written)

    def _write_behind(self, more: int) -> None:
        """Before `more` is written, have the kernel begin with what was written before, if that is much."""
        with self._lock:
            behind = self._behind
            self._behind = more if behind >= _WRITE_BEHIND else behind + more
        if behind >= _WRITE_BEHIND:
            _start_writing_back(self._fd)

    def truncate(self, size: int) -> None:
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)

    def begin_finish(self) -> None:
        if self._durable:
            _start_writing_back(self._fd)

    def sync(self) -> None:
        """Make what is written survive a power failure."""
        if self._durable:
            self._call("fsync")

    def finish(self) -> None:
        try:
            self.sync()
        finally:
            self.close()
        if self.then is not None:
            self.then()

    def abort(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                self.close()
            with suppress(OSError):
                self._os.unlink(self.path)


class LocalReadFile(_LocalFile):
    """A file that is open for reading in any order."""

    def __init__(self, system: Any, fd: int, path: Path) -> None:
        super().__init__(system, fd, path)
        try:
            status = system.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointFormatError(f"{path} is a folder, a pipe or a device, not a file")
        except BaseException:
            self.close()
            raise
        self.size: int = status.st_size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other from `offset` on; raises `EOFError` if the file is too short."""
        for group in _groups(buffers):
            while group:
                got = self._call("preadv", group, offset)
                if got == 0:
                    raise EOFError(f"{self.path} is too short: it ends at byte {offset}")
                offset += got
                group = _without_first(group, got)

    def read_in_steps(self, offset: int, buffers: Sequence[memoryview], arrived: Callable[[int], object]) -> None:
        """Like `read_into`, in steps that fit into the cache; calls `arrived` after each: see `Request`."""
        done = 0
        for group in _groups(buffers, _STEP):
            self.read_into(offset + done, group)
            done += sum([len(buffer) for buffer in group])
            arrived(done)


def _groups(buffers: Sequence[memoryview], most: int = _MAX_BYTES) -> list[Sequence[memoryview]]:
    """The buffers in groups that one system call can take, of at most `most` bytes."""
    if len(buffers) <= _MAX_BUFFERS and (together := sum(map(len, buffers))) <= most:
        return [buffers] if together else []
    groups: list[Sequence[memoryview]] = []
    group: list[memoryview] = []
    total = 0
    for buffer in buffers:
        for start in range(0, len(buffer), most):
            piece = buffer[start : start + most]
            if group and (total + len(piece) > most or len(group) == _MAX_BUFFERS):
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
    """Ask the kernel to start writing the file to the disk, so that the fsync at the end takes less time."""
    if _sync_file_range is not None:
        # 2: SYNC_FILE_RANGE_WRITE, for the whole file. It is a hint; failure is harmless.
        _sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)
