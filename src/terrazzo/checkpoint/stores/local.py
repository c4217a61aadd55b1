"""Checkpoints in a folder of a file system.

What each step is there for:
- data files are created under names of their own save, so an older checkpoint's files are never touched;
- each data file is made durable by its writer, and the folder before the root takes its name: a root that
  survives a loss of power never refers to data that did not;
- the root is written under a name that nobody else has, made durable, renamed over its final name, and the folder made
  durable again: a reader sees the old one or the new one, and the new one is there for good when `put` returns;
- comparing the root's version and renaming are one act, by a lock that the system releases when its holder dies;
- a save holds a lock on its lease: whether the process is still alive is asked of the system, not of a clock.  Where
  locks do not work (some network file systems) leases are judged by their age, and the root is compared without a lock;
- the folders above a new checkpoint folder are made durable too, or the whole folder could vanish.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import xxhash

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    Absent,
    Capabilities,
    Entry,
    Lease,
    ReadFile,
    Request,
    Store,
    Upload,
    Version,
)
from terrazzo.errors import CheckpointFormatError, ConflictError

_MAX_BUFFERS: Final = 1024  # IOV_MAX on Linux
_MAX_BYTES: Final = 1 << 30  # the kernel moves at most 2 GiB a call
_WRITE_BEHIND: Final = 8 << 20
_LOCK_SECONDS: Final = 60.0  # the lock is held for one rename
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
TEMPORARY: Final = ".tmp"  # ends the names of files that are not yet what they will be
LOCK: Final = ".lock"


class LocalStore(Store):
    """A folder.

    `durable` says whether files survive a loss of power.  `system` has the functions of the `os` module that files are
    touched with, and `flock`; tests put a failing one in its place.
    """

    caps = Capabilities()

    def __init__(self, path: str | os.PathLike[str], system: Any = os, *, durable: bool = True) -> None:
        self._path = Path(path)
        self._os = system
        self._durable = durable

    def __reduce__(self) -> tuple[Any, ...]:
        return _local_store, (self._path, self._durable)  # modules cannot be pickled

    @property
    def location(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

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

    def upload(self, key: str, size: int) -> LocalUpload:
        path = self._path / key
        fd = self._os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return LocalUpload(self._os, fd, path, durable=self._durable)

    def reserve(self, key: str, size: int) -> None:
        """Create a file of zeros, for `share`.

        Clients of a network file system may write zeros up to the end of a page that lies beyond the end of the file,
        and so over what another node has written there.  In a file that had its size before, nothing lies beyond.
        """
        fd = self._os.open(self._path / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._os.ftruncate(fd, size)
        finally:
            self._os.close(fd)

    def share(self, key: str) -> LocalUpload:
        """A file, made by `reserve`, of which several processes write each its part.

        `finish` makes this process's part durable.
        """
        path = self._path / key
        fd = self._os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return LocalUpload(self._os, fd, path, durable=self._durable)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give files, which are durable already, new names; a file that has such a name is replaced."""
        for old, new in names.items():
            self._os.replace(self._path / old, self._path / new)
        if self._durable:
            self.sync_folder(self._path)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Alone with a file, among all processes that ask for the same, if the file system has locks."""
        path = self._path / (key + LOCK)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            fd = self._os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                locked = self._try_lock(fd)
                # Whoever had the lock removed the file: then it is another file of the same name that counts now.
                if locked is None or (locked and _is_file_at(path, fd)):
                    break
            except BaseException:
                self._os.close(fd)
                raise
            self._os.close(fd)
            if time.monotonic() > deadline:
                raise ConflictError(f"{path} has been locked by another process for {_LOCK_SECONDS:.0f} seconds")
            time.sleep(0.01)
        try:
            yield
        finally:
            with suppress(OSError):  # the next one uses what stays
                self.delete([key + LOCK])
            with suppress(OSError):
                self._os.close(fd)

    def stream(self, key: str) -> Upload:
        for left in self.list(f".{key}."):  # of processes that were killed
            if left.key.endswith(TEMPORARY) and self.lease_ended(left.key, left.modified):
                self.delete([left.key])
        temporary, fd = self._create_locked(lambda: f".{key}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
        return _Replacing(self, LocalUpload(self._os, fd, self._path / temporary, durable=self._durable), key)

    def folders(self) -> Sequence[str]:
        try:
            return [name for name in self._os.listdir(self._path) if os.path.isdir(self._path / name)]
        except FileNotFoundError:
            return []

    def beneath(self, name: str) -> LocalStore:
        return LocalStore(self._path / name, self._os, durable=self._durable)

    def remove_folder(self, name: str) -> None:
        try:
            self._os.rmdir(self._path / name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):  # some systems say the last
                raise

    def sync(self) -> None:
        if self._durable:
            self.sync_folder(self._path)

    def read(self, requests: Iterable[Request], *, in_flight_bytes: int = 64 << 20) -> Iterator[Request]:
        file: _LocalReadFile | None = None
        name = ""
        try:
            for request in requests:
                if file is None or request.key != name:
                    if file is not None:
                        file.close()
                    file, name = self.open(request.key), request.key
                file.read_into(request.start, request.buffers)
                yield request
        finally:
            if file is not None:
                file.close()

    def open(self, key: str) -> _LocalReadFile:
        path = self._path / key
        try:
            # A pipe in a file's place would wait for a writer.
            fd = self._os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError as error:
            raise CheckpointFormatError(f"{str(path)!r} cannot be the name of a file: {error}") from error
        return _LocalReadFile(self._os, fd, str(path))

    def get(self, key: str) -> tuple[bytearray, Version]:
        file = self.open(key)
        try:
            data = bytearray(file.size)
            file.read_into(0, [memoryview(data)])
        finally:
            file.close()
        return data, _version(data)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        temporary, fd = self._create_locked(lambda: f"{key}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
        file = LocalUpload(self._os, fd, self._path / temporary, durable=self._durable)
        try:
            file.write(0, [memoryview(data)])
            file.sync()
            if self._durable:
                self.sync_folder(self._path)
            if only_if is None:
                self._os.replace(self._path / temporary, self._path / key)
            else:
                with self.locked(key):
                    if self._present(key) != only_if:
                        raise ConflictError(
                            f"{self._path / key} has been replaced by somebody else since this save began; what they "
                            f"wrote stays. Have one job save to one place, or save again"
                        )
                    self._os.replace(self._path / temporary, self._path / key)
        except BaseException:
            file.abort()
            raise
        file.finish(synced=True)
        if self._durable:
            self.sync_folder(self._path)
        return _version(data)

    def _create_locked(self, name: Callable[[], str]) -> tuple[str, int]:
        """A new file that this process has locked, so that others see that it is in use; its name and descriptor."""
        while True:
            key = name()
            fd = self._os.open(self._path / key, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                locked = self._try_lock(fd)
                if locked is None or (locked and _is_file_at(self._path / key, fd)):
                    return key, fd
            except BaseException:
                self._os.close(fd)
                self.delete([key])
                raise
            self._os.close(fd)  # somebody took it for a leftover between the two calls, and removes it

    def _present(self, key: str) -> Absent | Version:
        try:
            return self.get(key)[1]
        except FileNotFoundError:
            return ABSENT

    def _try_lock(self, fd: int) -> bool | None:
        """Whether this process has the lock now; None if there are no locks here."""
        try:
            getattr(self._os, "flock", fcntl.flock)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        return True

    def list(self, prefix: str = "") -> list[Entry]:
        try:
            names = self._os.listdir(self._path)
        except FileNotFoundError:
            return []
        entries = []
        for name in names:
            if name.startswith(prefix):
                with suppress(FileNotFoundError):  # removed in this moment
                    found = os.stat(self._path / name)
                    if not stat.S_ISDIR(found.st_mode):
                        entries.append(Entry(name, found.st_size, found.st_mtime))
        return entries

    def stat(self, key: str) -> Entry:
        found = os.stat(self._path / key)
        return Entry(key, found.st_size, found.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._os.unlink(self._path / key)

    def adopt(self, other: Store, key: str) -> bool:
        """By a hard link: the file lives as long as one of the folders has it."""
        if not isinstance(other, LocalStore):
            return False
        try:
            os.link(other._path / key, self._path / key)
        except FileExistsError:
            return self._path.samefile(other._path)
        except OSError:  # another disk, or a file system without links
            return False
        return True

    def lease(self, key: str) -> Lease:
        _, fd = self._create_locked(lambda: key)
        return _LocalLease(self, fd, key)

    def renew_lease(self, key: str) -> None:
        self.touch(key)  # another file in its place would not be locked

    def touch(self, key: str) -> None:
        """Make a file as young as one that is written now."""
        os.utime(self._path / key)

    def lease_ended(self, key: str, last_sign: float) -> bool:
        try:
            fd = self._os.open(self._path / key, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            locked = self._try_lock(fd)
        finally:
            self._os.close(fd)
        return time.time() - last_sign > self.lease_seconds if locked is None else locked

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


def _local_store(path: Path, durable: bool) -> LocalStore:
    return LocalStore(path, durable=durable)


def _version(data: bytes | bytearray | memoryview) -> Version:
    return Version(f"{xxhash.xxh3_128_hexdigest(data)}-{len(data)}")


def _is_file_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


class _LocalLease(Lease):
    def __init__(self, store: LocalStore, fd: int, key: str) -> None:
        self._store = store
        self._fd = fd
        self._key = key

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # what stays is removed by a later save
                self._store.delete([self._key])
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:  # nobody will release it: the save has failed
            os.close(self._fd)


class LocalUpload(Upload):
    """A file that is written where it will be."""

    def __init__(self, system: Any, fd: int, path: Path, *, durable: bool) -> None:
        self._os = system
        self._fd = fd
        self._path = str(path)
        self._durable = durable
        self._behind = 0  # bytes written since the kernel was last asked to begin with the disk
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """Where it is."""
        return self._path

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for group in _groups(buffers):
            total = sum(map(len, group))
            self._write_behind(total)
            written = self._pwritev(group, offset)
            done = written
            while done < total:  # a short write: carry on until the kernel says why
                if written == 0:
                    raise OSError(errno.EIO, "the file system accepted no bytes", self._path)
                group = _without_first(group, written)
                written = self._pwritev(group, offset + done)
                done += written
            offset += total

    def _write_behind(self, more: int) -> None:
        """Before `more` is written, have the kernel begin with what was written before, if that is much."""
        with self._lock:
            behind = self._behind
            self._behind = more if behind >= _WRITE_BEHIND else behind + more
        if behind >= _WRITE_BEHIND:
            _start_writing_back(self._fd)

    def _pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            written: int = self._os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        return written

    def truncate(self, size: int) -> None:
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Have what is written survive a loss of power."""
        if self._durable:
            try:
                self._os.fsync(self._fd)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from error

    def finish(self, *, synced: bool = False) -> None:
        try:
            if not synced:
                self.sync()
        finally:
            self._close()

    def abort(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                self._close()
            with suppress(OSError):
                self._os.unlink(self._path)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._os.close(fd)


class _Replacing(Upload):
    """A file under a name of its own, which takes its place when it is complete."""

    def __init__(self, store: LocalStore, file: LocalUpload, key: str) -> None:
        self._store = store
        self._file = file
        self._key = key

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._file.write(offset, buffers)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def finish(self) -> None:
        try:
            self._file.sync()
            self._store._os.replace(self._file.path, self._store.path / self._key)
        except BaseException:
            self._file.abort()
            raise
        self._file.finish(synced=True)
        if self._store._durable:
            self._store.sync_folder(self._store.path)

    def abort(self) -> None:
        self._file.abort()


class _LocalReadFile(ReadFile):
    holds_handle = True

    def __init__(self, system: Any, fd: int, path: str) -> None:
        self._os = system
        self._fd = fd
        self._path = path
        status = system.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointFormatError(f"{path} is a folder, a pipe or a device, where a file should be")
        self._size: int = status.st_size

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
