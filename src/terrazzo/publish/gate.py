"""Lets processes to a store only if they have a secret: a `TCPStore` has no way to ask who connects to it.

The store listens on a loopback address. A `Gate` listens at the address that others reach; whoever connects there has
to answer a challenge (HMAC with SHA-256, in both directions; the secret is not sent), and is then passed on to the
store. What follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Final

from terrazzo.errors import CommError

LOGGER: Final = logging.getLogger("terrazzo.publish")

SECRET: Final = "TERRAZZO_PUBLISH_SECRET"
_GREETING: Final = b"terrazzo.publish"
_NONCE: Final = 32  # bytes, as many as a digest has
_SECONDS: Final = 5.0  # for the challenge
_AT_ONCE: Final = 64  # connections that have not answered yet


class Gate:
    """Listens, and connects to the store at `inner`, a port of the loopback interface, who has the secret."""

    def __init__(self, listening: socket.socket, inner: int, secret: str) -> None:
        self._listening = listening
        self._inner = inner
        self._secret = secret.encode()
        self._waiting = threading.BoundedSemaphore(_AT_ONCE)
        threading.Thread(target=self._accept, name="terrazzo-gate", daemon=True).start()

    def close(self) -> None:
        """Listen no more; connections that exist stay."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listening.close()

    def _accept(self) -> None:
        while True:
            self._waiting.acquire()
            try:
                connection, address = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._let_in, args=(connection, address), name="terrazzo-gate", daemon=True).start()

    def _let_in(self, connection: socket.socket, address: tuple[str, int]) -> None:
        try:
            connection.settimeout(_SECONDS)
            challenge = secrets.token_bytes(_NONCE)
            connection.sendall(_GREETING + challenge)
            answer = _read(connection, 2 * _NONCE)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, self._proof(b"receiver", challenge, theirs)):
                LOGGER.warning("%s:%d was refused: it does not have the secret of this channel", *address[:2])
                connection.close()
                return
            connection.sendall(self._proof(b"publisher", challenge, theirs))
            inner = socket.create_connection(("127.0.0.1", self._inner), timeout=_SECONDS)
        except (OSError, EOFError):  # it closed the connection, or was too late
            connection.close()
            return
        finally:
            self._waiting.release()
        join(connection, inner)

    def _proof(self, side: bytes, challenge: bytes, theirs: bytes) -> bytes:
        return _proof(self._secret, side, challenge, theirs)


def enter(host: str, port: int, secret: str, seconds: float) -> socket.socket:
    """A connection to the store behind the gate at this address."""
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise CommError(f"{host}:{port} cannot be reached: {error}") from error
    try:
        connection.settimeout(min(_SECONDS, seconds / 2))
        greeting = _read(connection, len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise CommError(f"{host}:{port} is not a channel with a secret, but another server")
        challenge, own = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
        connection.sendall(own + _proof(secret.encode(), b"receiver", challenge, own))
        try:
            answer = _read(connection, _NONCE)
        except (EOFError, ConnectionError) as error:
            raise CommError(
                f"{host}:{port} has another secret: pass the same secret=, or set the same {SECRET}, on both sides"
            ) from error
        if not hmac.compare_digest(answer, _proof(secret.encode(), b"publisher", challenge, own)):
            raise CommError(f"{host}:{port} does not have this channel's secret")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | EOFError):
            raise CommError(
                f"{host}:{port} did not ask for a secret: it is another server, or a channel on that host's loopback "
                "address that was given none"
            ) from error
        raise
    return connection


def relayed(connection: socket.socket) -> int:
    """A port of the loopback interface that leads to this connection, once."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(_SECONDS)

    def accept() -> None:
        with listening:
            try:
                near, _ = listening.accept()
            except OSError:  # nobody came
                connection.close()
                return
        join(near, connection)

    threading.Thread(target=accept, name="terrazzo-gate", daemon=True).start()
    return int(listening.getsockname()[1])


def join(one: socket.socket, other: socket.socket) -> None:
    """Pass on what each of two connections receives to the other, until one of them ends."""
    for each in (one, other):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_pass_on, args=(other, one), name="terrazzo-gate", daemon=True)
    back.start()
    _pass_on(one, other)
    back.join()
    one.close()
    other.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _proof(secret: bytes, side: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.new(secret, side + challenge + own, hashlib.sha256).digest()


def _read(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = connection.recv(nbytes - len(found))
        if not more:
            raise EOFError("the connection was closed")
        found += more
    return found


def secret_of(given: str | None) -> str:
    """The secret that was given, or else that of the environment; empty if there is none."""
    return os.environ.get(SECRET, "") if given is None else given
