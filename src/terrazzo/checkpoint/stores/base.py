"""What checkpoints ask of the place where their bytes live.

A store holds the files of one checkpoint under flat keys.  Data files are written once, under keys of their own save,
and read in ranges.  Only `put` replaces anything, in one atomic act that can be made conditional: of two writers that
began from the same version, one gets `ConflictError`, and nothing of what is there is lost.

A new kind of place is one file with one subclass of `Store`: see docs/stores.md.
"""

from __future__ import annotations

import abc
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NewType, Protocol

import msgspec

# What `get` found, or `put` made, under a key.  Equal exactly if nobody has replaced it in between.
Version = NewType("Version", str)


class Absent:
    """`only_if=ABSENT`: only if there is nothing under the key."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()

# A save that shows no sign of life for so long is dead, where its death cannot be seen otherwise.
LEASE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store is good at.

    Attributes:
        in_place: uploads go to where they belong piece by piece.  If not, a file is sent when it is complete, and
            should not have more than `file_bytes`.
        file_bytes: about how large a data file should be at most; None: any size will do.
        request_bytes: about how much one request should read.
        gap: so many bytes that nobody wants are read sooner than another request is made.
        depth: requests that are under way at once.
    """

    in_place: bool = True
    file_bytes: int | None = None
    request_bytes: int = 1 << 20
    gap: int = 16 << 10
    depth: int = 1


class Entry(msgspec.Struct, frozen=True):
    """A file of a store: `modified` is in seconds since 1970, by the store's clock."""

    key: str
    size: int
    modified: float


class Request(msgspec.Struct, eq=False):
    """Bytes to be read: those of `key` from `start` on, into the buffers one after the other.

    `owner` is the asker's own.
    """

    key: str
    start: int
    buffers: Sequence[memoryview]
    owner: Any = None

    @property
    def size(self) -> int:
        """How many bytes it reads."""
        return sum(map(len, self.buffers))


class Upload(abc.ABC):
    """A data file being written.  Each method raises if it could not do all of its work."""

    @abc.abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after the other, the first at `offset`.

        Threads may write at once.  The buffers may be used for something else afterwards.
        """

    def give(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """As `write`, of buffers that stay as they are until the file is finished or aborted: they need no copy."""
        self.write(offset, buffers)

    def truncate(self, size: int) -> None:  # noqa: B027  # most files end where the last write did
        """The file will have `size` bytes, fewer than were announced."""

    @abc.abstractmethod
    def finish(self) -> None:
        """The file is complete: it exists from now on, and survives a loss of power if the store is durable."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Give up: as far as possible nothing of the file stays.  Does nothing after `finish`."""


class MemoryUpload(Upload):
    """A file that is put together in memory; `send` is given all of it when it is complete."""

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
        data, self._data = self._data, bytearray()
        self._send(memoryview(data))

    def abort(self) -> None:
        """Nothing is there before `finish`."""


class ScatteredUpload(Upload):
    """A file that is sent from where its parts lie in memory; `send` is given all of them, in order.

    Only what will not stay as it is, and what is too small to be worth a place of its own, is copied.
    """

    _SMALL: Final = 16 << 10

    def __init__(self, send: Callable[[Sequence[memoryview]], object]) -> None:
        self._parts: list[tuple[int, memoryview]] = []
        self._send = send

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._parts.append((offset, memoryview(b"".join(buffers))))

    def give(self, offset: int, buffers: Sequence[memoryview]) -> None:
        small: list[memoryview] = []
        for buffer in buffers:
            if len(buffer) < self._SMALL:
                small.append(buffer)
                continue
            offset = self._join(offset, small)
            self._parts.append((offset, buffer))
            offset += len(buffer)
            small = []
        self._join(offset, small)

    def _join(self, offset: int, small: Sequence[memoryview]) -> int:
        """Small buffers as one part; where the next one begins."""
        if small:
            joined = memoryview(b"".join(small))
            self._parts.append((offset, joined))
            offset += len(joined)
        return offset

    def finish(self) -> None:
        parts, self._parts = sorted(self._parts, key=lambda part: part[0]), []
        end = 0
        for offset, buffer in parts:
            if offset != end:
                raise ValueError(f"byte {end} of the file was to come next, but what was written begins at {offset}")
            end += len(buffer)
        self._send([buffer for _, buffer in parts])

    def abort(self) -> None:
        self._parts = []


class GrowingUpload(Upload):
    """A file that is written from its beginning to its end, and may become larger than memory.

    Args:
        send: is given all of a file that has stayed small, when it is complete.
        begin: makes something to write a larger one to, piece by piece.
        bound: how many bytes are small.
    """

    def __init__(self, send: Callable[[memoryview], object], begin: Callable[[], Sink], bound: int = 64 << 20) -> None:
        self._send = send
        self._begin = begin
        self._bound = bound
        self._held = bytearray()
        self._position = 0
        self._sink: Sink | None = None

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset != self._position:
            raise ValueError(f"byte {offset} was to be written next, but the file goes on at {self._position}")
        for buffer in buffers:
            self._position += len(buffer)
            if self._sink is not None:
                self._sink.write(buffer)
                continue
            self._held += buffer
            if len(self._held) > self._bound:
                self._sink = self._begin()
                held, self._held = self._held, bytearray()
                self._sink.write(memoryview(held))

    def finish(self) -> None:
        if self._sink is None:
            held, self._held = self._held, bytearray()
            self._send(memoryview(held))
        else:
            sink, self._sink = self._sink, None
            sink.commit()

    def abort(self) -> None:
        self._held = bytearray()
        if self._sink is not None:
            sink, self._sink = self._sink, None
            with suppress(OSError):
                sink.discard()


class Sink(Protocol):
    """Where a large file goes, piece by piece."""

    def write(self, data: memoryview) -> object:
        """Take the next bytes."""

    def commit(self) -> object:
        """That was all: the file exists from now on."""

    def discard(self) -> object:
        """Give up."""


class Lease(abc.ABC):
    """A sign that a save is under way: nobody removes its files."""

    @abc.abstractmethod
    def release(self) -> None:
        """The save has ended, one way or the other."""


class ReadFile(abc.ABC):
    """A file of a store, open for reading in any order.

    Attributes:
        holds_handle: whether an open one holds something that a process has few of.
    """

    holds_handle: bool = False

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The file's bytes."""

    @abc.abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other from `offset` on; all of them, or raise `EOFError`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the file."""


class Store(abc.ABC):
    """The files of one checkpoint.

    Errors are `OSError`s: `FileNotFoundError` for a key that is not there, `EOFError` for bytes beyond a file's end,
    `terrazzo.errors.ConflictError` from `put`.
    """

    caps: Capabilities = Capabilities()
    lease_seconds: float = LEASE_SECONDS  # for which a lease is good, where its holder's death cannot be seen

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where this is, for people."""

    def prepare(self) -> None:  # noqa: B027  # most stores need nothing
        """Make the place exist, so that files can be created."""

    @abc.abstractmethod
    def upload(self, key: str, size: int) -> Upload:
        """A new data file that will have about `size` bytes.  It is an error if there is one of this key."""

    @abc.abstractmethod
    def read(self, requests: Iterable[Request], *, in_flight_bytes: int = 64 << 20) -> Iterator[Request]:
        """Carry out requests, several at once where that helps; each is yielded when its buffers are full.

        They may be yielded in another order; not with `in_flight_bytes=0`, which also takes the next one only then.
        `in_flight_bytes` bounds the memory that requests need beside their own buffers.
        """

    @abc.abstractmethod
    def get(self, key: str) -> tuple[bytes | bytearray, Version]:
        """All of a file, and its version."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        """Make `key` refer to `data`, atomically: whatever happens, a reader sees all of the old or all of the new.

        With `only_if`, only if the key has this version, or is `ABSENT`; else `ConflictError`.  In a durable store,
        all files finished before survive a loss of power before this does, and afterwards this does too.
        """

    @abc.abstractmethod
    def list(self, prefix: str = "") -> list[Entry]:
        """The files whose keys begin so; none if the place does not exist."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove files; no error for those that are not there."""

    def folders(self) -> Sequence[str]:
        """The names of the folders in this one, of stores that have any."""
        return []

    def beneath(self, name: str) -> Store:
        """The store of a folder in this one, whether it is there or not."""
        raise OSError(errno.ENOTSUP, f"{self.location} has no folders in it, so there is no", name)

    def remove_folder(self, name: str) -> None:  # noqa: B027  # most stores have no folders without files
        """Remove a folder in this one if nothing is in it."""

    def sync(self) -> None:  # noqa: B027  # most stores do all things in order
        """What was done here survives a loss of power before what is done from now on."""

    def stream(self, key: str) -> Upload:
        """A file of any size, written from its beginning to its end.

        Until it is finished there is under its key what was there before, and all of the new one from then on.
        """
        return MemoryUpload(0, lambda data: self.put(key, data))

    def stat(self, key: str) -> Entry:
        """One file, without its bytes."""
        for entry in self.list(key):
            if entry.key == key:
                return entry
        raise FileNotFoundError(f"there is no {key} in {self.location}")

    def adopt(self, other: Store, key: str) -> bool:
        """Have a file of another store, under the same key and without moving its bytes; False if that cannot be."""
        return False

    # ------------------------------------------------- what the rest is made of

    def exists(self, key: str) -> bool:
        """Whether there is a file of this key."""
        try:
            self.stat(key)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open(self, key: str) -> ReadFile:
        """A file for reading in any order."""
        return _StoreFile(self, key, self.stat(key).size)

    def lease(self, key: str) -> Lease:
        """Show that a save is under way, by a file of this key."""
        self.put(key, b"")
        return _LeaseFile(self, key)

    def renew_lease(self, key: str) -> None:
        """Give a lease that is held a new date, where it is judged by that."""
        self.put(key, b"")

    def lease_ended(self, key: str, last_sign: float) -> bool:
        """Whether whoever held a lease is gone; `last_sign` is when a file of that save was last modified."""
        return time.time() - last_sign > self.lease_seconds


class _StoreFile(ReadFile):
    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for _ in self._store.read([Request(self._key, offset, buffers)], in_flight_bytes=0):
            pass

    def close(self) -> None:
        """Nothing is held between reads."""


class _LeaseFile(Lease):
    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def release(self) -> None:
        with suppress(OSError):  # what stays is removed by a later save
            self._store.delete([self._key])


def read_all(file: ReadFile) -> bytearray:
    """All of a file's bytes."""
    data = bytearray(file.size)
    file.read_into(0, [memoryview(data)])
    return data
