"""The interface of stores, in which checkpoints are kept.

A store has the files of one checkpoint, under flat keys. Data files are written once, under keys that have the save's
id, and read in ranges. Only `put` replaces a file, atomically, and on condition if asked: if two writers began with the
same version, one gets a `ConflictError`, and the other's file stays.

A new kind of store is one module with a subclass of `Store`: see docs/stores.md.
"""

from __future__ import annotations

import abc
import errno
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NewType, Self

import msgspec
import xxhash

from terrazzo.errors import CheckpointCorruptError, ConflictError

# The version of a file, from `get` or `put`. Two versions are equal exactly if the file was not replaced in between.
Version = NewType("Version", str)


class Absent:
    """`only_if=ABSENT`: only if the key does not exist."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()

# The most bytes of a file that is read whole: of a manifest or the like, which describes all chunks of a checkpoint,
# and of what is small if it is what its name says.
LARGEST: Final = 2 << 30
SMALL: Final = 100 << 20
TEMPORARY: Final = ".tmp"  # suffix of files that are renamed when they are complete
LOCK: Final = ".lock"
CLOCK: Final = "clock"  # the name of temporary files of which only the date is wanted
# What a file holds that is being removed on condition, in stores that cannot do that by one operation.
GONE: Final = b"terrazzo: removed\n"
# A save that has not written for so long counts as ended, in stores without locks.
LEASE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a store that decide how it is used.

    Attributes:
        in_place: whether uploads write to the final file piece by piece. If not, a file is sent when it is complete,
            and should not have more than `file_bytes`.
        file_bytes: the most bytes that a data file should have; None: any number.
        request_bytes: about how many bytes one request should read.
        direct_bytes: the same, if all of them go where they belong and need no buffer; None: as many.
        gap: the most bytes between two ranges that are read along instead of making another request.
        depth: the number of requests at a time: from the beginning so many threads read, if there may be (`readers`);
            else one call of `read` makes so many at a time itself.
        readers: the most threads that read at once, each by a call of `read`; as many are used as make it faster.
    """

    in_place: bool = True
    file_bytes: int | None = None
    request_bytes: int = 1 << 20
    gap: int = 16 << 10
    depth: int = 1
    direct_bytes: int | None = None
    readers: int = 1


class Entry(msgspec.Struct, frozen=True):
    """A file of a store: `modified` is in seconds since 1970, by the store's clock."""

    key: str
    size: int
    modified: float


class Request(msgspec.Struct, eq=False):
    """Bytes to read: those of `key` from `start` on, into the buffers one after the other.

    `owner` is for the caller. A store that reads a request in several steps calls `arrived`, if there is one, after
    each with the number of bytes that are there, so that the caller can use them while they are in the processor's
    cache. A store need not call it; it must not be called by another thread than the one that iterates over `read`.
    """

    key: str
    start: int
    buffers: Sequence[memoryview]
    owner: Any = None
    arrived: Callable[[int], object] | None = None

    @property
    def size(self) -> int:
        """The number of bytes to read."""
        return sum(map(len, self.buffers))


class Upload(abc.ABC):
    """A data file that is being written. Each method raises if it cannot do all of its work.

    As a context manager it finishes the file, or aborts it if an error is raised.
    """

    @abc.abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after the other, the first at `offset`.

        Several threads may write at once. The caller may change the buffers afterwards.
        """

    def give(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Like `write`, for buffers that do not change until the file is finished or aborted: they need no copy."""
        self.write(offset, buffers)

    def truncate(self, size: int) -> None:  # noqa: B027  # most files end where the last write did
        """Make the file `size` bytes long, fewer than `upload` was called with."""

    def begin_finish(self) -> None:  # noqa: B027  # most have nothing to begin
        """Begin what `finish` will wait for, if that can go on beside other work. Nothing is written any more."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Complete the file: it exists from now on, and survives a power failure if the store is durable."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove what has been written, if possible. Does nothing after `finish`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.finish() if kind is None else self.abort()


class MemoryUpload(Upload):
    """A file that is assembled in memory; `send` gets all of it when it is complete."""

    def __init__(self, size: int, send: Callable[[memoryview], object]) -> None:
        self._data = bytearray(size)
        self._send = send

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        if end > len(self._data):
            self._data.extend(bytes(end - len(self._data)))
        for buffer in buffers:
            self._data[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def truncate(self, size: int) -> None:
        del self._data[size:]

    def finish(self) -> None:
        self._send(self._taken())

    def abort(self) -> None:
        """Do nothing: the file does not exist before `finish`."""

    def _taken(self) -> memoryview:
        """What has been written, which this upload does not keep."""
        data, self._data = self._data, bytearray()
        return memoryview(data)


class ScatteredUpload(Upload):
    """A file that is sent from the buffers that it is made of; `send` gets them in order.

    Only buffers that may change (`write`) and small ones are copied.
    """

    _SMALL: Final = 16 << 10

    def __init__(self, send: Callable[[Sequence[memoryview]], object]) -> None:
        self._parts: list[tuple[int, memoryview]] = []
        self._send = send

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._parts.append((offset, memoryview(b"".join(buffers))))

    def give(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for are_small, several in groupby(buffers, lambda buffer: len(buffer) < self._SMALL):
            for part in [memoryview(b"".join(several))] if are_small else several:
                self._parts.append((offset, part))
                offset += len(part)

    def finish(self) -> None:
        parts, self._parts = sorted(self._parts, key=lambda part: part[0]), []
        end = 0
        for offset, buffer in parts:
            if offset != end:
                raise ValueError(f"the file has a hole: the next write should begin at byte {end}, not at {offset}")
            end += len(buffer)
        self._send([buffer for _, buffer in parts])

    def abort(self) -> None:
        self._parts = []


class GrowingUpload(Upload):
    """A file that is written from its beginning to its end, and may be larger than memory.

    Args:
        send: called with the whole file, if it is small.
        begin: called for a larger file; returns the upload to which it is written from its beginning to its end.
        bound: the most bytes of a small file.
    """

    def __init__(
        self, send: Callable[[memoryview], object], begin: Callable[[], Upload], bound: int = 64 << 20
    ) -> None:
        self._small = MemoryUpload(0, send)
        self._file: Upload = self._small
        self._begin = begin
        self._bound = bound
        self._position = 0

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset != self._position:
            raise ValueError(f"the next write must begin at byte {self._position}, not at {offset}")
        self._position += sum(map(len, buffers))
        if self._file is self._small and self._position > self._bound:
            self._file = self._begin()
            self._file.write(0, [self._small._taken()])
        self._file.write(offset, buffers)

    def finish(self) -> None:
        self._file.finish()

    def abort(self) -> None:
        with suppress(OSError):
            self._file.abort()


class Lease(abc.ABC):
    """A file that shows that a save is running, so that its files are not removed."""

    @abc.abstractmethod
    def release(self) -> None:
        """Remove the lease: the save has ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Store(abc.ABC):
    """The files of one checkpoint.

    Errors are `OSError`s: `FileNotFoundError` for a key that is not there, `EOFError` for bytes beyond a file's end,
    `terrazzo.errors.ConflictError` from `put`.
    """

    caps: Capabilities = Capabilities()
    lease_seconds: float = LEASE_SECONDS  # after which a lease expires, in stores without locks
    _clocks: tuple[float, float] | None = None  # the store's time and this process's, at one moment

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """The path or URL, for messages."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    def prepare(self) -> None:  # noqa: B027  # most stores need nothing
        """Create the folder or the like, so that files can be created."""

    @abc.abstractmethod
    def upload(self, key: str, size: int) -> Upload:
        """A new data file that will have about `size` bytes. It is an error if the key exists."""

    @abc.abstractmethod
    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Carry out requests, several at once if that is faster; each is yielded when its buffers are full.

        The order may change.
        """

    @abc.abstractmethod
    def get(self, key: str, most: int = LARGEST) -> tuple[bytes | bytearray, Version]:
        """The contents of a file, and its version.

        A file of more than `most` bytes is not read: `check_size` raises `terrazzo.errors.CheckpointCorruptError`.
        """

    @abc.abstractmethod
    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        """Write `data` to `key` atomically: readers get the old contents or the new ones.

        With `only_if`, only if the key has this version, or does not exist (`ABSENT`); else `ConflictError`. In a
        durable store the file survives a power failure when this returns, and not before all files that were finished
        earlier do.
        """

    @abc.abstractmethod
    def list(self, prefix: str = "") -> list[Entry]:
        """The files whose keys begin with `prefix`; none if the store does not exist."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove files; missing ones are no error."""

    def delete_if(self, key: str, version: Version) -> None:
        """Remove a file that has this version; else `ConflictError`.

        A store that cannot do it by one operation first replaces the file by one that holds `GONE`. Readers take that
        for absent, and it stays if this process dies.
        """
        self.put(key, GONE, only_if=version)
        self.delete([key])

    def delete_ended(self, keys: Iterable[str]) -> None:
        """Remove files that no process held a moment ago; those that one holds now stay, where there are locks."""
        self.delete(keys)

    def folders(self) -> Sequence[str]:
        """The names of the folders in this store, if the kind of store has folders."""
        return []

    def beneath(self, name: str) -> Store:
        """The store of a folder in this one, which need not exist."""
        raise OSError(errno.ENOTSUP, f"{self.location} is a store without folders, so it has no", name)

    def is_link(self, name: str) -> bool:
        """Whether a folder in this store is a link or a mount point: what it leads to is not this store's."""
        return False

    def remove_folder(self, name: str) -> None:  # noqa: B027  # most stores have no folders without files
        """Remove a folder in this store if it is empty."""

    def sync(self) -> None:  # noqa: B027  # most stores do all things in order
        """Make everything so far survive a power failure before anything that is done later."""

    def stream(self, key: str) -> Upload:
        """A file of any size, written from beginning to end; it replaces an existing one when it is finished."""
        return MemoryUpload(0, lambda data: self.put(key, data))

    def stat(self, key: str) -> Entry:
        """One file, without its bytes."""
        for entry in self.list(key):
            if entry.key == key:
                return entry
        raise FileNotFoundError(f"there is no {key} in {self.location}")

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        """Have a file of another store, under the key `name` and without moving its bytes.

        Returns the file's key in this store: `name`, or `key` if both stores are one place and the file stays as it is.
        None if that cannot be, or if the file is not there.
        """
        return None

    # ------------------------------------------------- what the rest is made of

    def exists(self, key: str) -> bool:
        """Whether there is a file of this key."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self.stat(key)
            return True
        return False

    def read_at(self, key: str, start: int, *buffers: memoryview) -> None:
        """Fill buffers with the bytes of a file from `start` on, one after the other."""
        for _ in self.read([Request(key, start, buffers)]):
            pass

    def lease(self, key: str) -> Lease:
        """Show that a save is under way, by a file of this key."""
        self.put(key, b"")
        return _LeaseFile(self, key)

    def renew_lease(self, key: str) -> None:
        """Give a lease that is held a new date, where it is judged by that.

        Raises a `FileNotFoundError` or a `ConflictError` if another process has removed it: it stays lost.
        """
        self.put(key, b"", only_if=self.get(key, SMALL)[1])

    def leases_expire(self) -> bool:
        """Whether leases end by their age, so that a process may go on after its lease has ended.

        False if a lease ends with its process only, as a lock does.
        """
        return True

    def lease_ended(self, key: str, last_sign: float) -> bool:
        """Whether the process that held a lease is gone; `last_sign` is when a file of its save was last modified."""
        return self.now() - last_sign > self.lease_seconds

    def now(self) -> float:
        """The time by the store's clock, from the date that it gives to a file. It is that of `Entry.modified`.

        Where this process may not write, it cannot remove anything either, and this host's clock is good enough.
        """
        if self._clocks is None:
            key = f"{CLOCK}.{uuid.uuid4().hex[:12]}{TEMPORARY}"  # if it stays, a later save removes it
            try:
                self.put(key, b"")
                written = time.monotonic()
                self._clocks = self.stat(key).modified, written
            except (OSError, NotImplementedError) as error:
                if not isinstance(error, PermissionError | NotImplementedError) and error.errno != errno.EROFS:
                    raise
                return time.time()
            finally:
                with suppress(OSError, NotImplementedError):
                    self.delete([key])
        there, here = self._clocks
        return there + time.monotonic() - here

    def present(self, key: str) -> Absent | Version:
        """The version of a file that is there now."""
        with suppress(FileNotFoundError):
            return self.get(key)[1]
        return ABSENT

    def _check_version(self, key: str, only_if: Absent | Version | None) -> None:
        """Raise a `ConflictError` unless a file has this version, or does not exist (`ABSENT`)."""
        if only_if is not None and self.present(key) != only_if:
            raise self.conflict(key)

    def _remove_left(self, key: str) -> None:
        """Remove what killed processes have left of files that were to be streamed to `key`."""
        for left in self.list(f".{key}."):
            if left.key.endswith(TEMPORARY) and self.lease_ended(left.key, left.modified):
                with suppress(PermissionError):  # it is another user's
                    self.delete_ended([left.key])

    def conflict(self, key: str) -> ConflictError:
        """The error of a `put` whose condition does not hold."""
        return ConflictError(
            f"{self.location}/{key} was replaced by another save since this one began; the other checkpoint stays. Let "
            "only one job save there, or save again"
        )


class _LeaseFile(Lease):
    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def release(self) -> None:
        with suppress(OSError):  # what stays is removed by a later save
            self._store.delete([self._key])


def write_pieces(store: Store, key: str, pieces: Iterable[bytearray]) -> None:
    """Write a file of any size from its pieces; it replaces an existing one when it is complete."""
    position = 0
    with store.stream(key) as upload:
        for piece in pieces:
            upload.write(position, [memoryview(piece)])
            position += len(piece)


def version_of(data: bytes | bytearray | memoryview) -> Version:
    """The version of a file with these bytes, in stores that have no versions of their own."""
    return Version(f"{xxhash.xxh3_128_hexdigest(data)}-{len(data)}")


def check_size(store: Store, key: str, size: int, most: int) -> None:
    """Raise if a file has more bytes than one of its name can have, so that it is not read into memory."""
    if size > most:
        raise CheckpointCorruptError(
            f"{store.location}/{key} has {size} bytes, more than the {most} that such a file may have, so it is not "
            "read: move it away if it is not what its name says"
        )
