"""The folder of another host as a store: a server on each host (`comm.serving`), for the ranks of the same run only.

Ranks exchange the servers' addresses and secrets over the process group. Only folders of steps and plain file names are
accepted, so no other files can be reached.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.native.names import is_plain_name, step_of_name
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, MemoryUpload, Request, Store, Upload, Version, check_size
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.comm.addresses import listen_at
from terrazzo.comm.serving import LONGEST, PIECE, Client, Server

_SECRET: Final = 32


def serve_folder(store: LocalStore, host: str, timeout: float, send_on: Callable[[str, str], None]) -> Server:
    """Serve a folder of this host. `send_on` copies a file of it to the root."""
    folder = _Folder(store, send_on)
    return Server(listen_at(host), secrets.token_bytes(_SECRET), lambda: folder, timeout)


class _Folder:
    """The operations on a folder of this host."""

    def __init__(self, store: LocalStore, send_on: Callable[[str, str], None]) -> None:
        self._store = store
        self._send_on = send_on

    def close(self) -> None:
        """Do nothing: a connection holds nothing."""

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        """Carry out an operation on the folder, or on that of a step, whose name is the first argument."""
        folder, *rest = arguments
        if folder and step_of_name(folder) is None:
            raise ValueError(f"{folder!r} is not the folder of a step")
        store = self._store.beneath(folder) if folder else self._store
        match operation, rest:
            case "folders", []:
                return list(store.folders())
            case "is_link", [str(name)]:
                return store.is_link(_plain(name))
            case "list", [str(prefix)]:
                return [msgspec.structs.astuple(entry) for entry in store.list(prefix)]
            case "stat", [str(key)]:
                return msgspec.structs.astuple(store.stat(_plain(key)))
            case "read", [str(key), int(start), int(size)]:
                buffer = bytearray(min(size, LONGEST))
                with closing(store.open(_plain(key))) as file:
                    file.read_into(start, [memoryview(buffer)])
                return buffer
            case "get", [str(key)]:
                return bytearray(store.get(_plain(key))[0])
            case "put", [str(key)]:
                store.prepare()
                store.put(_plain(key), b"".join(follows))
            case "file", [str(key)]:
                store.prepare()
                _write(store.stream(_plain(key)), follows)
            case "delete", [*keys]:
                store.delete([_plain(key) for key in keys])
            case "delete_ended", [*keys]:
                store.delete_ended([_plain(key) for key in keys])
            case "sync", []:
                store.sync()
            case "remove_folder", [str(name)]:
                if step_of_name(name) is not None:
                    self._store.remove_folder(name)
            case "lease_ended", [str(key), float(sign)]:
                return store.lease_ended(_plain(key), sign)
            case "adopt", [str(other), str(key), str(name)]:
                if step_of_name(other) is None:
                    raise ValueError(f"{other!r} is not the folder of a step")
                store.prepare()
                return store.adopt(self._store.beneath(other), _plain(key), _plain(name))
            case "send_on", [str(key)]:
                self._send_on(folder, _plain(key))
            case _:
                raise ValueError(f"there is no operation {operation}{tuple(rest)}")
        return None


class PeerStore(Store):
    """The folder of another host, through its server."""

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

    def folders(self) -> Sequence[str]:
        return list(self._call("folders"))

    def is_link(self, name: str) -> bool:
        return bool(self._call("is_link", name))

    def beneath(self, name: str) -> PeerStore:
        return PeerStore(self._client, name)

    def list(self, prefix: str = "") -> list[Entry]:
        return [Entry(*each) for each in self._call("list", prefix)]

    def stat(self, key: str) -> Entry:
        return Entry(*self._call("stat", key))

    def get(self, key: str, most: int = LARGEST) -> tuple[bytearray, Version]:
        check_size(self, key, self.stat(key).size, most)
        return self._call("get", key), Version("")  # `put` of that host finds the version itself

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._call("put", key, data=[memoryview(data)], follows=len(data))
        return Version("")

    def upload(self, key: str, size: int) -> Upload:
        return MemoryUpload(size, lambda data: self._call("file", key, data=[data], follows=len(data)))

    def send(self, key: str, path: str) -> None:
        """Send a file of this host there."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = iter(lambda: memoryview(file.read(PIECE)), memoryview(b""))
            self._call("file", key, data=pieces, follows=size)

    def send_on(self, key: str) -> None:
        """Make that host copy a file to the root."""
        self._call("send_on", key)

    def read(self, requests: Iterable[Request], *, in_flight_bytes: int = 64 << 20) -> Iterator[Request]:
        for request in requests:
            position = request.start
            for buffer in request.buffers:
                for begin in range(0, len(buffer), PIECE):
                    part = buffer[begin : begin + PIECE]
                    self._call("read", request.key, position, len(part), into=part)
                    position += len(part)
            yield request

    def delete(self, keys: Iterable[str]) -> None:
        self._call("delete", *keys)

    def delete_ended(self, keys: Iterable[str]) -> None:
        self._call("delete_ended", *keys)

    def remove_folder(self, name: str) -> None:
        self._call("remove_folder", name)

    def sync(self) -> None:
        self._call("sync")

    def lease_ended(self, key: str, last_sign: float) -> bool:
        return bool(self._call("lease_ended", key, last_sign))

    def adopt_from(self, other: str, key: str, name: str) -> str | None:
        """Take over a file from another folder of that host, under the key `name`."""
        adopted = self._call("adopt", other, key, name)
        return None if adopted is None else str(adopted)


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


def _plain(key: Any) -> str:
    if not isinstance(key, str) or "/" in key or not is_plain_name(key):
        raise ValueError(f"{key!r} is not a plain file name")
    return key
