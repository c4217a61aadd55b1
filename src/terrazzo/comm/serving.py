"""Calls between processes over TCP: a server, for processes that have its secret, and its clients.

    greeting:  each side sends random bytes, and the HMAC of the other's with the secret, which is not sent itself
    call:      a frame (operation, arguments, number of bytes that follow), and those bytes
    answer:    frames that say `working` while the operation runs, then a frame with its result, and its bytes

A frame is four bytes of length and MessagePack. Nothing is encrypted. Each side closes the connection if it receives
nothing within its time limit, or cannot send; `working` is sent more often than that. Between two calls a server waits
without a limit.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from terrazzo._threads import Worker

LOGGER: Final = logging.getLogger("terrazzo.comm")

PIECE: Final = 4 << 20  # bytes that are received at once, of those that follow a call
LONGEST: Final = 64 << 20  # bytes of a frame
_GREETING: Final = b"terrazzo.serving"
_NONCE: Final = 32  # bytes, as many as a digest has
_SECONDS: Final = 5.0  # between two `working` frames
_GREETING_SECONDS: Final = 30.0  # what a process computes may keep its threads from answering
_AT_ONCE: Final = 64  # connections that have not answered the greeting yet
_PAUSE: Final = 0.1  # seconds, after a connection could not be accepted
_LAST_SECONDS: Final = 10.0  # for which `close` waits for answers that are under way


class WrongSecretError(OSError):
    """The server has another secret than this client."""


class Address(msgspec.Struct, frozen=True):
    """Where a server listens, and its secret."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class _Call(msgspec.Struct, array_like=True, frozen=True):
    operation: str
    arguments: tuple[Any, ...] = ()
    follows: int = 0


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    kind: str  # working, done, absent, failed
    result: Any = None
    follows: int = 0


class Session(Protocol):
    """What a server does for one connection."""

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        """The result of a call: a value, or a buffer, whose bytes are sent. An error is raised by the caller, too."""

    def close(self) -> None:
        """The connection has ended."""


class Server:
    """Answers calls, each connection's on a thread of its own."""

    def __init__(self, listening: socket.socket, secret: bytes, session: Callable[[], Session], timeout: float) -> None:
        self._listening = listening
        self._secret = secret
        self._session = session
        self._timeout = timeout
        self._open: set[socket.socket] = set()
        self._answering: set[socket.socket] = set()  # those of them whose call has been received, but not answered
        self._closed = False
        self._changed = threading.Condition()  # notified when a call has been answered; its lock is that of these three
        self._waiting = threading.BoundedSemaphore(_AT_ONCE)
        host, port = listening.getsockname()[:2]
        self.address = Address(host, port, secret)
        threading.Thread(target=self._accept, name="terrazzo-serve", daemon=True).start()

    def close(self) -> None:
        """Listen no more, answer the calls that have been received, and close all connections.

        What is not answered within a time limit is cut. An operation must not call this: it would wait for itself.
        """
        with self._changed:
            self._closed = True
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._listening.close()
            _end(self._open - self._answering)
            self._changed.wait_for(lambda: not self._answering, _LAST_SECONDS)
            _end(self._open)

    def _accept(self) -> None:
        told = ""  # once, and not ten times a second
        while True:
            self._waiting.acquire()
            try:
                connection, peer = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                if str(error) != told:
                    told = str(error)
                    LOGGER.warning("%s: a connection was not accepted: %s", self.address, error)
                time.sleep(_PAUSE)  # there may be too many open files for a while
                self._waiting.release()
                continue
            told = ""
            with self._changed:
                self._open.add(connection)
                if self._closed:
                    _end([connection])
            threading.Thread(target=self._serve, args=(connection, peer), name="terrazzo-serve", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: tuple[Any, ...]) -> None:
        try:
            with connection:
                try:
                    known = self._greet(connection)
                finally:
                    self._waiting.release()
                if not known:
                    LOGGER.warning("%s:%d was refused: it does not have the secret of this server", *peer[:2])
                    return
                session = self._session()
                try:
                    with Worker("terrazzo-serve") as worker:
                        while True:
                            self._answer_one(connection, session, worker)
                finally:
                    session.close()
        except (OSError, EOFError, msgspec.MsgspecError):  # the other side has ended, or is none of ours
            pass
        finally:
            with self._changed:
                self._open.discard(connection)

    def _greet(self, connection: socket.socket) -> bool:
        """Whether the other side has the secret."""
        connection.settimeout(_GREETING_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_NONCE)
        connection.sendall(_GREETING + own)
        theirs, proof = _received(connection, _NONCE), _received(connection, _NONCE)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", own, theirs)):
            return False
        connection.sendall(_proof(self._secret, b"server", own, theirs))
        return True

    def _answer_one(self, connection: socket.socket, session: Session, worker: Worker) -> None:
        connection.settimeout(None)  # the next call may come after any time
        call = msgspec.msgpack.decode(_frame(connection), type=_Call)
        with self._changed:
            if self._closed:
                raise EOFError("the server is closed")
            self._answering.add(connection)
        try:
            connection.settimeout(self._timeout)
            working = worker.submit(partial(_answered, session, call, connection))
            while True:
                try:
                    answer, payload = working.result(_SECONDS)
                    break
                except NotYet:
                    _send(connection, _Answer("working"))
            _send(connection, answer)
            if answer.follows:
                connection.sendall(payload)
        finally:
            with self._changed:
                self._answering.discard(connection)
                self._changed.notify_all()


def _end(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        with suppress(OSError):  # the other side has ended it
            connection.shutdown(socket.SHUT_RDWR)


def _answered(session: Session, call: _Call, connection: socket.socket) -> tuple[_Answer, Any]:
    rest = _Rest(connection, call.follows)
    try:
        result = session.answer(call.operation, call.arguments, rest)
    except (FileNotFoundError, NotADirectoryError) as error:
        return _Answer("absent", str(error)), b""
    except Exception as error:  # sent to the caller
        for _ in rest:  # so that the next call can be received
            pass
        return _Answer("failed", f"{type(error).__name__}: {error}"), b""
    if isinstance(result, bytearray | memoryview):
        return _Answer("done", None, len(result)), result
    return _Answer("done", result), b""


class _Rest:
    """The bytes that follow a call, in pieces."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection = connection
        self._left = size

    def __iter__(self) -> Iterator[bytearray]:
        while self._left:
            piece = _received(self._connection, min(self._left, PIECE))
            self._left -= len(piece)
            yield piece


class Client:
    """Calls to one server, from any thread; each connection carries one call at a time."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self._timeout = timeout
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(
        self,
        operation: str,
        *arguments: Any,
        data: Iterable[memoryview] = (),
        follows: int = 0,
        into: memoryview | None = None,
    ) -> Any:
        """The result of an operation; `data` are the `follows` bytes that follow the call.

        A result of bytes goes `into` this memory, if there is one, and must have its size. `FileNotFoundError` if the
        operation raised it, `OSError` if it raised another error, or if the server does not answer.
        """
        try:
            connection = self._connection()
            try:
                _send(connection, _Call(operation, arguments, follows))
                for piece in data:
                    connection.sendall(piece)
                while (answer := msgspec.msgpack.decode(_frame(connection), type=_Answer)).kind == "working":
                    pass
                if into is not None and answer.kind == "done" and answer.follows != len(into):
                    raise EOFError(f"{answer.follows} bytes came, and {len(into)} were expected")
                result: Any = answer.result
                if answer.follows:
                    result = _received(connection, answer.follows, into)
            except BaseException:
                connection.close()
                raise
        except WrongSecretError:
            raise
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise OSError(f"the process at {self.address} does not answer: {error}") from error
        with self._lock:
            self._idle.append(connection)
        if answer.kind == "absent":
            raise FileNotFoundError(result)
        if answer.kind != "done":
            raise OSError(f"the process at {self.address}: {result}")
        return result

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        address = self.address
        connection = socket.create_connection((address.host, address.port), self._timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(connection)
            connection.settimeout(self._timeout)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(min(_GREETING_SECONDS, self._timeout))
        try:
            greeting = bytes(_received(connection, len(_GREETING)))
            theirs = _received(connection, _NONCE)
        except (OSError, EOFError) as error:
            raise OSError(f"it did not ask for a secret ({error}), so it is another server, or stopped") from error
        if greeting != _GREETING:
            raise OSError("it did not ask for a secret, so it is another server")
        own, secret = secrets.token_bytes(_NONCE), self.address.secret
        connection.sendall(own + _proof(secret, b"client", theirs, own))
        try:
            proof = _received(connection, _NONCE)
        except (EOFError, ConnectionError) as error:
            raise WrongSecretError(f"the process at {self.address} has another secret") from error
        if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, own)):
            raise WrongSecretError(f"the process at {self.address} does not have the secret")


def _proof(secret: bytes, side: bytes, of_server: bytes | bytearray, of_client: bytes | bytearray) -> bytes:
    return hmac.new(secret, side + of_server + of_client, hashlib.sha256).digest()


def _send(connection: socket.socket, message: _Call | _Answer) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _frame(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_received(connection, 4), "little")
    if size > LONGEST:
        raise EOFError(f"a message of {size} bytes")
    return _received(connection, size)


def _received(connection: socket.socket, size: int, into: memoryview | None = None) -> bytearray:
    """`size` bytes; or none, if they are received `into` a buffer of the caller."""
    data = bytearray(size if into is None else 0)
    view = memoryview(data) if into is None else into
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data
