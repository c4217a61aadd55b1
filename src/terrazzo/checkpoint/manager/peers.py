"""The folder of another host as a store: a server on each host (`comm.serving`), for the ranks of the same run only.

Ranks exchange the servers' addresses and secrets over the process group. Only folders of steps and plain file names are
accepted, so no other files can be reached.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import is_plain_name, step_of_name
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, MemoryUpload, Request, Store, Upload, Version, check_size
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.comm.addresses import listen_at
from terrazzo.comm.serving import LONGEST, PIECE, Client, Server
from terrazzo.errors import CheckpointNotFoundError

# Copies files of a step's folder, which has this name, to the root, by `copy_whole`.
SendOn = Callable[[str, Sequence[str]], Sequence[str]]
_SECRET: Final = 32
# The operations of a store that are called as they are.
_PLAIN_CALLS: Final = frozenset("delete delete_ended folders is_link lease_ended list remove_folder stat sync".split())


def serve_folder(store: LocalStore, host: str, timeout: float, send_on: SendOn) -> Server:
    """Serve a folder of this host."""
    folder = _Folder(store, send_on)
    return Server(listen_at(host), secrets.token_bytes(_SECRET), lambda: folder, timeout)


class _Folder:
    """The operations on a folder of this host."""

    def __init__(self, store: LocalStore, send_on: SendOn) -> None:
        self._store = store
        self._send_on = send_on

    def close(self) -> None:
        """Do nothing: a connection holds nothing."""

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        """Carry out an operation on the folder, or on that of a step, whose name is the first argument."""
        folder, *rest = arguments
        store = self._store.beneath(_step(folder)) if folder else self._store
        plain = rest if operation == "list" else [_plain(each) for each in rest]  # which gets a prefix, no name
        match operation, plain:
            case "read", [key, int(start), int(size)]:
                buffer = bytearray(min(size, LONGEST))
                store.read_at(key, start, memoryview(buffer))
                return buffer
            case "get", [key]:
                return bytearray(store.get(key)[0])
            case "file", [key]:
                store.prepare()
                return _write(store.stream(key), follows)
            case "adopt", [other, key, name]:
                store.prepare()
                return store.adopt(self._store.beneath(_step(other)), key, name)
            case "send_on", [[*keys]]:
                return self._send_on(folder, keys)
        if operation in _PLAIN_CALLS:
            return getattr(store, operation)(*plain)
        raise ValueError(f"there is no operation {operation}{tuple(rest)}")


def _there(operation: str, kind: Any = None) -> Any:
    """A store's operation, as that host carries it out, with a result of this kind."""

    def call(store: PeerStore, *arguments: Any) -> Any:
        plain = [each if isinstance(each, str | int | float) else list(each) for each in arguments]
        return msgspec.convert(store._call(operation, *plain), kind)

    return call


class PeerStore(Store):
    """The folder of another host, through its server."""

    delete, delete_ended, remove_folder, sync = map(_there, ("delete", "delete_ended", "remove_folder", "sync"))
    is_link, lease_ended = _there("is_link", bool), _there("lease_ended", bool)
    folders, list, stat = _there("folders", list[str]), _there("list", list[Entry]), _there("stat", Entry)

    def __init__(self, client: Client, folder: str = "") -> None:
        self._client = client
        self.folder = folder

    @property
    def location(self) -> str:
        return f"{self._client.address}/{self.folder}"

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, operation: str, *arguments: Any, **bytes_with_it: Any) -> Any:
        return self._client.call(operation, self.folder, *arguments, **bytes_with_it)

    def beneath(self, name: str) -> PeerStore:
        return PeerStore(self._client, name)

    def get(self, key: str, most: int = LARGEST) -> tuple[bytearray, Version]:
        check_size(self, key, self.stat(key).size, most)
        return self._call("get", key), Version("")  # `put` of that host finds the version itself

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._call("file", key, data=[memoryview(data)], follows=len(data))
        return Version("")

    def upload(self, key: str, size: int) -> Upload:
        return MemoryUpload(size, lambda data: self.put(key, data))

    def send(self, key: str, path: str | os.PathLike[str]) -> None:
        """Send a file of this host there."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = iter(lambda: memoryview(file.read(PIECE)), memoryview(b""))
            self._call("file", key, data=pieces, follows=size)

    def send_on(self, keys: Sequence[str]) -> Sequence[str]:
        """Make that host copy files to the root; returns what `copy_whole` does there."""
        return msgspec.convert(self._call("send_on", list(keys)), list[str])

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            position = request.start
            for buffer in request.buffers:
                for begin in range(0, len(buffer), PIECE):
                    part = buffer[begin : begin + PIECE]
                    self._call("read", request.key, position, len(part), into=part)
                    position += len(part)
            yield request

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        return self._call("adopt", other.folder, key, name) if isinstance(other, PeerStore) else None


def _write(upload: Upload, pieces: Iterable[bytearray]) -> None:
    position = 0
    try:
        for piece in pieces:
            upload.write(position, [memoryview(piece)])
            position += len(piece)
    except BaseException:
        upload.abort()
        raise
    upload.finish()


def _plain(value: Any) -> Any:
    """The value, if the names in it are plain."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str) and ("/" in value or not is_plain_name(value)):
        raise ValueError(f"{value!r} is not a plain file name")
    return value


def _step(folder: str) -> str:
    if step_of_name(folder) is None:
        raise ValueError(f"{folder!r} is not the folder of a step")
    return folder


def copy_file(source: Store, target: Store, key: str) -> None:
    """Copy a file unless the target has it."""
    size = source.stat(key).size
    with suppress(FileNotFoundError):
        if target.stat(key).size == size:
            return

    def pieces() -> Iterator[bytearray]:
        for start in range(0, size, PIECE):
            piece = bytearray(min(PIECE, size - start))
            source.read_at(key, start, memoryview(piece))
            yield piece

    _write(target.stream(key), pieces())


def copy_whole(source: Store, target: Store, keys: Sequence[str]) -> list[str]:
    """Copy files of a checkpoint; returns those that are not as they were written, which are not copied."""
    try:
        wrong = {damage.file for damage in verify_store(source, only=keys)}
    except CheckpointNotFoundError:
        wrong = {MANIFEST}
    damaged = [key for key in keys if key in wrong or MANIFEST in wrong]  # without it nothing can be compared
    for key in keys:
        if key not in damaged:
            copy_file(source, target, key)
    return damaged
