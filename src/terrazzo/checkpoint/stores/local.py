"""Checkpoints in a folder of a file system.

The reasons for each step:
- data files have the save's id in their names, so an older checkpoint's files are never changed;
- each data file is made durable by its writer, and the folder before the root is renamed: a root that survives a power
  failure never refers to data that did not;
- the root is written under a unique name, made durable, renamed to its final name, and the folder is made durable
  again: a reader gets the old root or the new one, and the new one is durable when `put` returns;
- the root's version is compared and the root renamed under a lock, which the system releases if its holder dies;
- a save holds a lock on its lease, so that the system knows whether the process is alive. If locks do not work (some
  network file systems), leases expire by their age by the file system's clock, and the root is compared without a lock;
- the folders above a new checkpoint's folder are made durable, too, or the whole folder could be lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.stores.base import (
    LARGEST,
    LOCK,
    TEMPORARY,
    Absent,
    Capabilities,
    Entry,
    Lease,
    Request,
    Store,
    Upload,
    Version,
    check_size,
    version_of,
)
from terrazzo.checkpoint.stores.local_files import LocalReadFile, LocalUpload
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, ConflictError

_LOCK_SECONDS: Final = 60.0  # the lock is held for one rename
_LOOK_SECONDS: Final = 1.0  # a lock is held for a moment to see whether another process holds it
# The last: NFS does not lock a file that may only be read.
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class LocalStore(Store):
    """A folder.

    `durable` says whether files survive a power failure. `system` has the functions of the `os` module for files, and
    `flock`; tests replace it to make calls fail.
    """

    # Between two requests, what prepares the next one has to be brought back into the processor's cache; but there have
    # to be enough of them for several threads.
    caps = Capabilities(direct_bytes=16 << 20, readers=16)

    def __init__(self, path: str | os.PathLike[str], system: Any = os, *, durable: bool = True) -> None:
        self._path = Path(path).absolute()  # it stays this folder if the process changes its own
        self._os = system
        self._durable = durable
        self._leases_expire = False  # known when a lock is refused

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LocalStore, durable=self._durable), (self._path,)  # modules cannot be pickled

    @property
    def location(self) -> str:
        return str(self._path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def prepare(self) -> None:
        new = takewhile(lambda folder: not folder.is_dir(), (self._path, *self._path.parents))
        for folder in reversed(list(new)):
            try:
                self._os.mkdir(folder)
            except FileExistsError as error:  # another rank has created it
                if not folder.is_dir():
                    raise CheckpointExistsError(
                        f"{folder} is a file (or a link that leads nowhere), and a folder is needed there: use another "
                        "name, or remove it first"
                    ) from error
            self.sync_folder(folder.parent)

    def upload(self, key: str, size: int) -> LocalUpload:
        path = self._path / key
        fd = self._os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return LocalUpload(self._os, fd, path, durable=self._durable)

    def reserve(self, key: str, size: int) -> None:
        """Create a file of zeros, for `share`.

        Clients of a network file system may write zeros beyond the end of the file, up to the end of the page, and so
        over what another node has written there. In a file that has its final size there is nothing beyond the end.
        """
        fd = self._os.open(self._path / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._os.ftruncate(fd, size)
        finally:
            self._os.close(fd)

    def share(self, key: str) -> LocalUpload:
        """A file from `reserve`, to which several processes write, each its part.

        `finish` makes this process's part durable.
        """
        path = self._path / key
        fd = self._os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return LocalUpload(self._os, fd, path, durable=self._durable)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename durable files; existing files with the new names are replaced."""
        for old, new in names.items():
            self._os.replace(self._path / old, self._path / new)
        self.sync()

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a file while the context lasts, if the file system has locks."""
        path = self._path / (key + LOCK)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            fd = self._open_to_lock(path, os.O_CREAT)
            if fd is not None:
                try:
                    locked = self._try_lock(fd)
                    # The last holder removed the file, so another file of the same name may be the lock now.
                    if locked is None or (locked and _is_file_at(path, fd)):
                        break
                except BaseException:
                    self._os.close(fd)
                    raise
                self._os.close(fd)
            else:
                with suppress(FileNotFoundError):  # another user's, who may have died with it
                    if self.lease_ended(key + LOCK, os.stat(path).st_mtime):
                        self.delete_ended([key + LOCK])
            if time.monotonic() > deadline:
                raise ConflictError(f"{path} has been locked by another process for {_LOCK_SECONDS:.0f} seconds")
            time.sleep(0.01)
        with _LocalLease(self, fd, key + LOCK):
            yield

    def stream(self, key: str) -> Upload:
        self._remove_left(key)
        return self._replacing(f".{key}.", key)

    def folders(self) -> Sequence[str]:
        with suppress(FileNotFoundError):
            return [name for name in self._os.listdir(self._path) if _is_folder(self._path / name)]
        return []

    def is_link(self, name: str) -> bool:
        return os.path.islink(self._path / name) or _is_mount(self._path / name)

    def beneath(self, name: str) -> LocalStore:
        return LocalStore(self._path / name, self._os, durable=self._durable)

    def remove_folder(self, name: str) -> None:
        try:
            self._os.rmdir(self._path / name)
        except OSError as error:
            # Some systems say the last for a folder that is not empty; links and mount points stay.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR, errno.EBUSY, errno.EEXIST):
                raise

    def sync(self) -> None:
        if self._durable:
            self.sync_folder(self._path)

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        file: LocalReadFile | None = None
        name = ""
        with ExitStack() as opened:
            for request in requests:
                if file is None or request.key != name:
                    opened.close()
                    file, name = opened.enter_context(closing(self._opened(request.key))), request.key
                if request.arrived is None:
                    file.read_into(request.start, request.buffers)
                else:
                    file.read_in_steps(request.start, request.buffers, request.arrived)
                yield request

    def _opened(self, key: str) -> LocalReadFile:
        path = self._path / key
        try:
            # Opening a pipe instead of a file would wait for a writer.
            fd = self._os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError as error:
            raise CheckpointFormatError(f"{str(path)!r} cannot be the name of a file: {error}") from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _loop(path) from error
        return LocalReadFile(self._os, fd, path)

    def get(self, key: str, most: int = LARGEST) -> tuple[bytearray, Version]:
        with closing(self._opened(key)) as file:
            check_size(self, key, file.size, most)
            data = bytearray(file.size)
            file.read_into(0, [memoryview(data)])
        return data, version_of(data)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        with self._replacing(f"{key}.", key) as file:
            file.only_if = only_if
            file.write(0, [memoryview(data)])
        return version_of(data)

    def _replacing(self, prefix: str, key: str) -> _Replacing:
        temporary, fd = self._create_locked(lambda: f"{prefix}{uuid.uuid4().hex[:12]}{TEMPORARY}")
        return _Replacing(self, fd, temporary, key)

    def _create_locked(self, name: Callable[[], str]) -> tuple[str, int]:
        """A new file with a lock, which shows other processes that it is in use; its name and descriptor."""
        while True:
            key = name()
            fd = self._os.open(self._path / key, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                locked = self._try_lock(fd)
                deadline = time.monotonic() + _LOOK_SECONDS
                while locked is False and time.monotonic() < deadline:  # by one that looks whether it is a leftover
                    time.sleep(0.001)
                    locked = self._try_lock(fd)
                if locked is None or (locked and _is_file_at(self._path / key, fd)):
                    return key, fd
            except BaseException:
                self._os.close(fd)
                self.delete([key])
                raise
            self._os.close(fd)  # another process has removed it as a leftover

    def _try_lock(self, fd: int) -> bool | None:
        """Whether this process has got the lock; None if the file system has no locks."""
        try:
            getattr(self._os, "flock", fcntl.flock)(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self._leases_expire = True
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
                # Just removed, or a link to nothing or itself, which says so when it is opened.
                with suppress(FileNotFoundError, CheckpointFormatError):
                    found = self._stat(name)
                    if not stat.S_ISDIR(found.st_mode):
                        entries.append(Entry(name, found.st_size, found.st_mtime))
        return entries

    def _stat(self, key: str) -> os.stat_result:
        try:
            return self._os.stat(self._path / key)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _loop(self._path / key) from error

    def stat(self, key: str) -> Entry:
        found = self._stat(key)
        return Entry(key, found.st_size, found.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        self._each(keys, self._unlink)

    def delete_if(self, key: str, version: Version) -> None:
        with self.locked(key):
            self._check_version(key, version)
            self._unlink(key)

    def delete_ended(self, keys: Iterable[str]) -> None:
        """Remove files while holding their locks, so that none is removed that another process has just locked."""
        self._each(keys, self._unlink_unlocked)

    def _each(self, keys: Iterable[str], remove: Callable[[str], None]) -> None:
        refused: PermissionError | None = None
        for key in keys:
            try:
                remove(key)
            except FileNotFoundError:
                pass
            except PermissionError as error:  # another user's: remove the others first
                refused = refused or error
        if refused is not None:
            raise refused

    def _unlink(self, key: str) -> None:
        outer = os.path.dirname(key)
        if outer and os.path.realpath(self._path / outer) != os.path.join(os.path.realpath(self._path), outer):
            raise PermissionError(errno.EPERM, "it is not removed, because a link leads to it", str(self._path / key))
        self._os.unlink(self._path / key)

    def _unlink_unlocked(self, key: str) -> None:
        fd = self._open_to_lock(self._path / key)
        try:
            # Another process may have removed the file meanwhile, and locked a new one of the same name.
            if fd is None or (self._try_lock(fd) is not False and _is_file_at(self._path / key, fd)):
                self._unlink(key)
        finally:
            if fd is not None:
                self._os.close(fd)

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        """Take over a file of another folder by a hard link: it exists as long as one of the folders has it."""
        if not isinstance(other, LocalStore):
            return None
        try:
            self._os.link(os.path.realpath(other._path / key), self._path / name)  # not a link to it
        except FileExistsError:  # by another rank
            if not os.path.samefile(other._path / key, self._path / name):
                return None
        except OSError:  # it is gone, or on another disk, or the file system has no hard links
            return None
        if self._durable:  # which the other folder need not be
            self._sync_path(self._path / name, 0)
        return name

    def lease(self, key: str) -> Lease:
        _, fd = self._create_locked(lambda: key)
        return _LocalLease(self, fd, key)

    def renew_lease(self, key: str) -> None:
        os.utime(self._path / key)  # a new file would not be locked

    def lease_ended(self, key: str, last_sign: float) -> bool:
        try:
            fd = self._open_to_lock(self._path / key)
        except FileNotFoundError:
            return True
        locked = None  # not known, if another user does not even let this one read
        if fd is not None:
            try:
                locked = self._try_lock(fd)
            finally:
                self._os.close(fd)
        if locked is None:
            self._leases_expire = True
            return super().lease_ended(key, last_sign)
        return locked

    def leases_expire(self) -> bool:
        return self._leases_expire

    def _open_to_lock(self, path: Path, create: int = 0) -> int | None:
        """Open a file that may be another user's or in a place that is only read; None if it may not be read either."""
        refused: OSError | None = None
        for flags in (os.O_RDWR | create, os.O_RDONLY):
            try:
                return self._os.open(path, flags | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                if refused is None:
                    raise
                raise refused from None  # it could not be created
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                refused = error
        return None

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` survive a power failure."""
        self._sync_path(folder, os.O_DIRECTORY)

    def _sync_path(self, path: Path, flags: int) -> None:
        fd = self._os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            self._os.fsync(fd)
        except OSError as error:
            # Some network file systems cannot sync a folder, and need not.
            if not flags or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            self._os.close(fd)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, or may be one: a link that leads nowhere, or what cannot be looked at."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.islink(path)
    except OSError:
        return True


def _is_mount(path: Path) -> bool:
    """Whether something is mounted there, even a folder of the same file system, which `ismount` does not see."""
    if os.path.ismount(path):
        return True
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:  # not on Linux
        return False
    there = os.fsencode(os.path.realpath(path))
    for plain, escaped in ((b"\\", rb"\134"), (b" ", rb"\040"), (b"\t", rb"\011"), (b"\n", rb"\012")):
        there = there.replace(plain, escaped)
    return any(line.split()[4] == there for line in table.splitlines())


def _loop(path: Path) -> CheckpointFormatError:
    return CheckpointFormatError(f"{path} is a link that leads back to itself")


def _is_file_at(path: Path, fd: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


class _LocalLease(Lease):
    def __init__(self, store: LocalStore, fd: int, key: str) -> None:
        self._store = store
        self._fd = fd
        self._key = key

    def release(self) -> None:
        if self._fd >= 0:
            try:
                with suppress(OSError):  # a later save removes it, or uses it as its lock
                    self._store.delete([self._key])
            finally:
                fd, self._fd = self._fd, -1
                with suppress(OSError):  # nothing was written by it
                    os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:  # not released, because the save failed
            os.close(self._fd)


class _Replacing(LocalUpload):
    """A file under a temporary name, which replaces `key` when it is complete, if that has the version `only_if`."""

    only_if: Absent | Version | None = None

    def __init__(self, store: LocalStore, fd: int, temporary: str, key: str) -> None:
        super().__init__(store._os, fd, store.path / temporary, durable=store._durable)
        self._store = store
        self._key = key

    def finish(self) -> None:
        """Complete the file, and rename it; `ConflictError` if the key has another version."""
        try:
            self.sync()
            self._store.sync()  # the new file never refers to files whose names were not durable
            if self.only_if is None:
                self._rename()
            else:
                with self._store.locked(self._key):
                    self._store._check_version(self._key, self.only_if)
                    self._rename()
            self.close()
        except BaseException:
            self.abort()
            raise
        self._store.sync()

    def _rename(self) -> None:
        self._os.replace(self.path, self._store.path / self._key)
