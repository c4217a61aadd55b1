"""The folder of another host as a store: a server on each host, for the ranks of the same run only.

    request: a frame (operation, folder, arguments, number of bytes that follow), and those bytes
    answer:   frames with `working` while the operation runs, then a frame with its result, and its bytes

A frame is four bytes of length and MessagePack. A connection begins with the run's secret, which ranks exchanged over
the process group. Only folders of steps and plain file names are accepted, so no other files can be reached. Each side
closes the connection if it receives nothing within its time limit; `working` is sent more often than that.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from terrazzo._threads import Worker
from terrazzo.checkpoint.native.names import is_plain_name, step_of_name
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, MemoryUpload, Request, Store, Upload, Version, check_size
from terrazzo.checkpoint.stores.local import LocalStore

PIECE: Final = 4 << 20  # bytes that are sent at once
_LONGEST_FRAME: Final = 64 << 20
_SECRET: Final = 32
_BREATH: Final = 5.0  # seconds between two `working` frames


class Address(msgspec.Struct, frozen=True):
    """The address of a host's server, and its secret."""

    host: str
    port: int
    secret: bytes


class _Call(msgspec.Struct, array_like=True, frozen=True):
    operation: str
    folder: str
    arguments: tuple[Any, ...] = ()
    follows: int = 0


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    kind: str  # working, done, absent, failed
    result: Any = None
    follows: int = 0


class PeerServer:
    """Serves a folder of this host. `send_on` copies a file of it to the root."""

    def __init__(self, store: LocalStore, host: str, timeout: float, send_on: Callable[[str, str], None]) -> None:
        self._store = store
        self._timeout = timeout
        self._send_on = send_on
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(_SECRET))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="terrazzo-peer", daemon=True).start()

    def close(self) -> None:
        """Close the server."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the socket was closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="terrazzo-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        try:
            worker = Worker("terrazzo-peer")
            with connection, worker:
                connection.settimeout(self._timeout)
                if not hmac.compare_digest(bytes(_received(connection, _SECRET)), self.address.secret):
                    return
                connection.settimeout(None)  # the next call may come with the next save
                while True:
                    call = msgspec.msgpack.decode(_frame(connection), type=_Call)
                    working = worker.submit(partial(self._answer, call, connection))
                    while True:
                        try:
                            answer, payload = working.result(_BREATH)
                            break
                        except NotYet:
                            _send(connection, _Answer("working"))
                    _send(connection, answer)
                    if payload:
                        connection.sendall(payload)
        except (OSError, EOFError, msgspec.MsgspecError):  # the other side has ended, or is not a rank of the run
            pass
        finally:
            self._open.discard(connection)

    def _answer(self, call: _Call, connection: socket.socket) -> tuple[_Answer, bytes | bytearray]:
        rest = _Rest(connection, call.follows, self._timeout)
        try:
            result = self._done(call, rest)
        except (FileNotFoundError, NotADirectoryError) as error:
            return _Answer("absent", str(error)), b""
        except Exception as error:  # sent to the caller
            rest.drain()
            return _Answer("failed", f"{type(error).__name__}: {error}"), b""
        if isinstance(result, bytearray):
            return _Answer("done", None, len(result)), result
        return _Answer("done", result), b""

    def _done(self, call: _Call, rest: _Rest) -> Any:
        if call.folder and step_of_name(call.folder) is None:
            raise ValueError(f"{call.folder!r} is not the folder of a step")
        store = self._store.beneath(call.folder) if call.folder else self._store
        match call.operation, call.arguments:
            case "folders", ():
                return list(store.folders())
            case "is_link", (str(name),):
                return store.is_link(_plain(name))
            case "list", (str(prefix),):
                return [(entry.key, entry.size, entry.modified) for entry in store.list(prefix)]
            case "stat", (str(key),):
                entry = store.stat(_plain(key))
                return entry.key, entry.size, entry.modified
            case "read", (str(key), int(start), int(size)):
                buffer = bytearray(min(size, _LONGEST_FRAME))
                with _closing(store.open(_plain(key))) as file:
                    file.read_into(start, [memoryview(buffer)])
                return buffer
            case "get", (str(key),):
                return bytearray(store.get(_plain(key))[0])
            case "put", (str(key),):
                store.prepare()
                store.put(_plain(key), b"".join(rest))
            case "file", (str(key),):
                store.prepare()
                _write(store.stream(_plain(key)), rest)
            case "delete", list() | tuple() as keys:
                store.delete([_plain(key) for key in keys])
            case "sync", ():
                store.sync()
            case "remove_folder", (str(name),):
                if step_of_name(name) is not None:
                    self._store.remove_folder(name)
            case "lease_ended", (str(key), float(sign)):
                return store.lease_ended(_plain(key), sign)
            case "adopt", (str(other), str(key), str(name)):
                if step_of_name(other) is None:
                    raise ValueError(f"{other!r} is not the folder of a step")
                store.prepare()
                return store.adopt(self._store.beneath(other), _plain(key), _plain(name))
            case "send_on", (str(key),):
                self._send_on(call.folder, _plain(key))
            case _:
                raise ValueError(f"there is no operation {call.operation}{call.arguments}")
        return None


class PeerStore(Store):
    """The folder of another host, through its server."""

    def __init__(self, address: Address, timeout: float, folder: str = "", pool: _Pool | None = None) -> None:
        self._pool = pool or _Pool(address, timeout)
        self._folder = folder

    @property
    def location(self) -> str:
        return f"{self._pool.name}/{self._folder}"

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _call(self, operation: str, *arguments: Any, data: Iterable[memoryview] = (), follows: int = 0) -> Any:
        return self._pool.call(_Call(operation, self._folder, arguments, follows), data)

    def folders(self) -> Sequence[str]:
        return list(self._call("folders"))

    def is_link(self, name: str) -> bool:
        return bool(self._call("is_link", name))

    def beneath(self, name: str) -> PeerStore:
        return PeerStore(self._pool.address, self._pool.timeout, name, self._pool)

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
                    part[:] = self._call("read", request.key, position, len(part))
                    position += len(part)
            yield request

    def delete(self, keys: Iterable[str]) -> None:
        self._call("delete", *keys)

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


class _Pool:
    """Connections to one server; each carries one call at a time."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self.name = f"{address.host}:{address.port}"
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(self, call: _Call, data: Iterable[memoryview]) -> Any:
        try:
            connection = self._connection()
            try:
                answer, payload = _asked(connection, call, data)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise OSError(f"the host at {self.name} does not answer: {error}") from error
        with self._lock:
            self._idle.append(connection)
        if answer.kind == "absent":
            raise FileNotFoundError(answer.result)
        if answer.kind != "done":
            raise OSError(f"the host at {self.name}: {answer.result}")
        return payload if answer.result is None and payload is not None else answer.result

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = socket.create_connection((self.address.host, self.address.port), self.timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self.address.secret)
        return connection


class _Rest:
    """The bytes that follow a call, in pieces."""

    def __init__(self, connection: socket.socket, size: int, timeout: float) -> None:
        self._connection = connection
        self._left = size
        self._timeout = timeout

    def __iter__(self) -> Iterator[bytearray]:
        self._connection.settimeout(self._timeout)
        try:
            while self._left:
                piece = _received(self._connection, min(self._left, PIECE))
                self._left -= len(piece)
                yield piece
        finally:
            self._connection.settimeout(None)

    def drain(self) -> None:
        """Read the remaining bytes, so that the next call can be received."""
        for _ in self:
            pass


def _asked(connection: socket.socket, call: _Call, data: Iterable[memoryview]) -> tuple[_Answer, bytearray | None]:
    _send(connection, call)
    for piece in data:
        connection.sendall(piece)
    while True:
        answer = msgspec.msgpack.decode(_frame(connection), type=_Answer)
        if answer.kind != "working":
            return answer, _received(connection, answer.follows) if answer.follows else None


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


class _closing:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _plain(key: Any) -> str:
    if not isinstance(key, str) or "/" in key or not is_plain_name(key):
        raise ValueError(f"{key!r} is not a plain file name")
    return key


def _send(connection: socket.socket, message: _Call | _Answer) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _frame(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_received(connection, 4), "little")
    if size > _LONGEST_FRAME:
        raise EOFError(f"a message of {size} bytes")
    return _received(connection, size)


def _received(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data
