"""Calls between processes: what a server does is what its caller gets, and nobody waits for a process that is gone."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from terrazzo.comm import serving
from terrazzo.comm.serving import Address, Client, Server, WrongSecretError


class Desk:
    """A session that does a few things, and says when its connection has ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        match operation, arguments:
            case "add", (int(a), int(b)):
                return a + b
            case "turn", ():
                return bytearray(b"".join(follows)[::-1])
            case "sleep", (seconds,):
                time.sleep(seconds)
                return "awake"
            case "wait", (int(size),):
                self.begun.set()
                assert self.go.wait(60)
                return bytearray(size)
            case "look", ():
                raise FileNotFoundError("it is not here")
        raise ValueError(f"there is no {operation}")

    def close(self) -> None:
        self.ended.set()


@contextmanager
def served(timeout: float = 5.0) -> Iterator[tuple[Server, Client, Desk]]:
    desk = Desk()
    server = Server(socket.create_server(("127.0.0.1", 0)), b"between us", lambda: desk, timeout)
    client = Client(server.address, timeout)
    yield server, client, desk
    client.close()
    server.close()


def test_values_bytes_and_errors() -> None:
    with served() as (_, client, desk):
        assert client.call("add", 1, 2) == 3
        data = os.urandom(9_000_001)  # of several pieces
        turned = data[::-1]
        assert client.call("turn", data=[memoryview(data)], follows=len(data)) == turned
        into = bytearray(len(data))
        client.call("turn", data=[memoryview(data)], follows=len(data), into=memoryview(into))
        assert into == turned
        with pytest.raises(FileNotFoundError, match="it is not here"):
            client.call("look")
        # What was sent with a call that failed is not taken for the next call.
        with pytest.raises(OSError, match="ValueError: there is no other"):
            client.call("other", data=[memoryview(data)], follows=len(data))
        with pytest.raises(OSError, match="3 bytes came, and 5 were expected"):
            client.call("turn", data=[memoryview(b"abc")], follows=3, into=memoryview(bytearray(5)))
        assert client.call("add", 2, 2) == 4
        client.close()
        assert desk.ended.wait(20)


def test_a_call_may_take_longer_than_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SECONDS", 0.05)
    with served(timeout=0.5) as (_, client, _):
        assert client.call("sleep", 1.2) == "awake"


def test_a_process_that_is_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SECONDS", 0.05)  # which is not for the greeting
    with socket.create_server(("127.0.0.1", 0)) as busy:
        client = Client(Address(*busy.getsockname()[:2], b"s"), 60.0)
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(client.call, "add", 1, 1)
            with busy.accept()[0] as connection:
                time.sleep(0.5)  # its threads get no turn
                connection.sendall(b"not a greeting" * 20)
            with pytest.raises(OSError, match="did not ask for a secret, so it is another server"):
                called.result()


def test_a_server_that_is_gone() -> None:
    with served() as (server, client, desk):
        assert client.call("add", 1, 1) == 2
        server.close()
        assert desk.ended.wait(20)
        for _ in range(2):
            with pytest.raises(OSError, match="does not answer"):
                client.call("add", 1, 1)


def test_what_has_been_asked_is_answered_before_the_end() -> None:
    with served(timeout=60.0) as (server, client, desk), ThreadPoolExecutor(2) as pool:
        with client._connection() as idle:
            asked = pool.submit(client.call, "wait", 9_000_001)
            assert desk.begun.wait(60)
            closing = pool.submit(server.close)
            assert not idle.recv(1)  # the server closes connections
        with pytest.raises(OSError, match="does not answer"):
            client.call("add", 1, 1)
        assert not closing.done()
        desk.go.set()
        assert asked.result() == bytes(9_000_001)
        closing.result(60)
        assert desk.ended.wait(60)


def test_who_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LAST_SECONDS", 0.2)
    with served(timeout=1000.0) as (server, client, desk), client._connection() as connection:
        serving._send(connection, serving._Call("wait", (64 << 20,)))  # more than a connection holds
        desk.go.set()
        assert desk.begun.wait(60)
        server.close()
        assert desk.ended.wait(60)


def test_who_connects_while_it_closes_is_not_served() -> None:
    class Listening(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            found = super().accept()
            accepted.set()
            assert closed.wait(60)
            return found

    accepted, closed = threading.Event(), threading.Event()
    listening = Listening(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    server = Server(listening, b"between us", Desk, 1000.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Client(server.address, 60.0).call, "add", 1, 1)
        assert accepted.wait(60)
        server.close()
        closed.set()
        with pytest.raises(OSError, match="or stopped"):
            asked.result()


def test_a_connection_that_cannot_be_accepted_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Listening(socket.socket):
        tries = 0

        def accept(self) -> tuple[socket.socket, Any]:
            self.tries += 1
            if self.tries in (1, 2, 3, 5):
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(serving, "_PAUSE", 0.001)
    listening = Listening(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    server = Server(listening, b"between us", Desk, 60.0)
    for _ in range(2):
        assert Client(server.address, 60.0).call("add", 1, 1) == 2
    server.close()
    told = [record for record in caplog.records if "was not accepted" in record.message]
    assert len(told) == 2, "once for three in a row, and again for the next"


def test_other_secrets_and_other_servers() -> None:
    with served() as (server, client, _):
        other = Client(msgspec.structs.replace(server.address, secret=b""), 5.0)
        with pytest.raises(WrongSecretError, match="has another secret"):
            other.call("add", 1, 1)
        assert client.call("add", 1, 1) == 2
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = serving.Address("127.0.0.1", silent.getsockname()[1], b"between us")
        with pytest.raises(OSError, match="did not ask for a secret"):
            Client(address, 0.3).call("add", 1, 1)
