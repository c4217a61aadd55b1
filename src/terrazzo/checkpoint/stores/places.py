"""Find the store for a path or a URL."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from terrazzo._meant import refused
from terrazzo.checkpoint.stores.base import Store
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.errors import CheckpointIOError, CheckpointNotFoundError, TerrazzoError

_FILE: Final = "file://"
_OBJECT_SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL, not a path of this machine.

    >>> is_url("s3://bucket/run"), is_url("/runs/1")
    (True, False)
    """
    return "://" in os.fspath(path)


def store_at(path: str | os.PathLike[str], *, durable: bool = True, **settings: Any) -> Store:
    """The store for a folder or a URL: `s3://`, `gs://`, `az://`, `file://`, or others that `fsspec` has.

    `settings` go to the store's client. Without them, the usual environment variables are used.

    >>> store_at("/runs/1").location, store_at("s3://bucket/run", region="eu-west-1").location
    ('/runs/1', 's3://bucket/run')
    """
    text = os.fspath(path)
    scheme, mark, _ = text.partition("://")
    if not mark or scheme == "file":
        return LocalStore(_local(text), durable=durable)
    if scheme in _OBJECT_SCHEMES:
        from terrazzo.checkpoint.stores.object_store import ObjectStore  # its client is loaded when it is asked for

        return ObjectStore(text, **settings)
    from terrazzo.checkpoint.stores.fsspec_store import FsspecStore

    return FsspecStore(text, **settings)


@contextmanager
def doing(what: str, place: Place) -> Iterator[None]:
    """Raise the system's errors as a `CheckpointIOError` that says what was being done at a place; and what is free on
    a disk that is full."""
    try:
        yield
    except TerrazzoError:
        raise
    except (OSError, EOFError) as error:
        number = error.errno if isinstance(error, OSError) else None
        more = refused(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            more = ": make room there, or choose another place"
            if place.local is not None:
                folder = next(each for each in (place.local, *place.local.parents) if each.is_dir())
                status = os.statvfs(folder)
                more = f" ({status.f_bavail * status.f_frsize} bytes are free in {folder}){more}"
        raised = CheckpointIOError(f"{what} {place} failed: {error}{more}")
        raised.errno = number
        raise raised from error


class Place:
    """A folder or a file, of this machine or at a URL, with a part of the interface of `pathlib.Path`.

    It can also be constructed from a store, as its folder.

    >>> str(Place("s3://bucket/run") / "latest"), Place("/runs/1").name
    ('s3://bucket/run/latest', '1')
    """

    def __init__(self, path: str | os.PathLike[str] | Store) -> None:
        self._path: str | Path  # of a store that is not local: its location
        self._store = path if isinstance(path, Store) else None
        self._is_given = isinstance(path, Store)
        self._parent: Place | None = None
        if isinstance(path, Store):
            self._path = path.path if isinstance(path, LocalStore) else path.location
        else:
            text = os.fspath(path)
            is_local = not is_url(text) or text.startswith(_FILE)
            self._path = Path(_local(text)).absolute() if is_local else text.rstrip("/")

    def __str__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __truediv__(self, name: str) -> Place:
        outer, _, name = name.rpartition("/")
        if outer:
            return self / outer / name
        child = copy.copy(self)
        child._parent, child._store = self, None
        child._path = self._path / name if isinstance(self._path, Path) else f"{self._path}/{name}"
        return child

    @property
    def name(self) -> str:
        """The last component."""
        return self._path.name if isinstance(self._path, Path) else self._path.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """The folder that contains it."""
        if self._parent is not None:
            return self._parent
        if isinstance(self._path, Path):
            return Place(self._path.parent)
        outer, _, name = self._path.rpartition("/")
        if self._is_given or outer.endswith(("/", ":")):  # a bucket
            raise CheckpointNotFoundError(f"{self._path} is not in a folder, so {name!r} cannot be a file")
        return Place(outer)

    @property
    def store(self) -> Store:
        """The store of this folder."""
        if self._store is None:
            parent = self._parent
            self._store = store_at(self._path) if parent is None else parent.store.beneath(self.name)
        return self._store

    @property
    def local(self) -> Path | None:
        """The path, if it is in a file system of this machine."""
        return self._path if isinstance(self._path, Path) else None

    @property
    def is_named(self) -> bool:
        """Whether its path or URL is enough to construct it again. A store that was passed may have other settings."""
        return not self._is_given

    @property
    def path(self) -> str | Path:
        """The path or the URL."""
        return self._path

    def is_file(self) -> bool:
        """Whether there is a file."""
        if isinstance(self._path, Path):
            return self._path.is_file()
        try:
            parent = self.parent
        except CheckpointNotFoundError:  # a bucket, or a store's own folder
            return False
        return parent.store.exists(self.name)  # which may say that there is no such bucket

    def is_dir(self) -> bool:
        """Whether there is a folder; at a URL, a prefix with at least one file."""
        return self._path.is_dir() if isinstance(self._path, Path) else bool(self.names())

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return self._path.exists() if isinstance(self._path, Path) else self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """The names of the files and folders in a folder."""
        if isinstance(self._path, Path):
            return os.listdir(self._path)
        return [*(entry.key for entry in self.store.list()), *self.store.folders()]

    def start(self, most: int) -> tuple[bytes, int]:
        """The first bytes of a file, so many or all, and its size."""
        store = self.parent.store
        size = store.stat(self.name).size
        data = bytearray(min(size, most))
        store.read_at(self.name, 0, memoryview(data))
        return bytes(data), size


def _local(text: str) -> str:
    return text.removeprefix(_FILE)
