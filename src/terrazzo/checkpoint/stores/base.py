"""What the native format asks of the place where its files live.

A store holds the files of one checkpoint under flat names.  Data files are created, written once from front to
back, and made durable.  `publish` is the one act that must be atomic: afterwards the name refers to all of the
new bytes, durably; had it failed at any point, to all of the old ones.  On a file system that is a rename, on
an object store a put.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence


class WriteFile(abc.ABC):
    """A data file being written.  Each method raises if it could not do all of its work."""

    @abc.abstractmethod
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after the other, the first at `offset`.  Threads may write at once."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Make what has been written survive a loss of power."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the file."""


class ReadFile(abc.ABC):
    """A file being read."""

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
    """The files of one checkpoint."""

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where this is, for people."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make the place exist, so that files can be created."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """The names of all files; none if the place does not exist."""

    @abc.abstractmethod
    def create(self, name: str, size: int) -> WriteFile:
        """A new data file that will have `size` bytes."""

    @abc.abstractmethod
    def open(self, name: str) -> ReadFile:
        """A file for reading; raises `FileNotFoundError` if there is none."""

    @abc.abstractmethod
    def publish(self, name: str, data: bytes | memoryview, *, durable: bool) -> None:
        """Make `name` refer to `data`, atomically, whether or not it existed.

        If `durable`, then before that the existence of all files created so far survives a loss of power, and
        afterwards this does too.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; no error if there is none."""


def read_all(file: ReadFile) -> bytearray:
    """All of a file's bytes."""
    data = bytearray(file.size)
    file.read_into(0, [memoryview(data)])
    return data
