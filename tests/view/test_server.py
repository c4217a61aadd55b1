"""The server: this machine only, only who knows the address, and nothing but reading."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from urllib.parse import quote, urlsplit

import pytest
import torch

from terrazzo.checkpoint import Checkpoint, save
from terrazzo.view import Viewer, page_of


@pytest.fixture
def viewer(tmp_path):
    save({"a/b &?#": torch.arange(4.0), "n": 3, "long": "x" * 200_000}, checkpoint_id=tmp_path / "one")
    checkpoint = Checkpoint(tmp_path / "one")
    with Viewer(page_of(checkpoint), [checkpoint]) as found:
        yield found


def ask(viewer: Viewer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def root_of(viewer: Viewer) -> str:
    return urlsplit(viewer.url).path


def test_the_page_and_its_numbers(viewer):
    status, body = ask(viewer, root_of(viewer))
    assert status == 200 and b"<!doctype html>" in body[:30]
    status, body = ask(viewer, f"{root_of(viewer)}statistics?name={quote('a/b &?#', safe='')}&of=0")
    assert status == 200 and json.loads(body)["max"] == 3.0
    status, body = ask(viewer, f"{root_of(viewer)}value?name=n&of=0")
    assert (status, json.loads(body)) == (200, {"type": "int", "text": "3", "longer": False})
    found = json.loads(ask(viewer, f"{root_of(viewer)}value?name=long&of=0")[1])
    assert found["longer"] and len(found["text"]) == 100_000


@pytest.mark.parametrize("path", ["/", "/x/", "/favicon.ico", "/../etc/passwd", "//"])
def test_without_the_token_there_is_nothing(viewer, path):
    assert ask(viewer, path)[0] == 404


@pytest.mark.parametrize(
    "rest",
    ["statistics", "statistics?name=absent&of=0", "statistics?name=n&of=0", "value?name=a%2Fb%20%26%3F%23&of=0",
     "value?name=n&of=1", "value?name=n&of=-1", "value?name=n&of=x", "other?name=n&of=0", "../one", "%2e%2e/"],
)  # fmt: skip
def test_what_is_not_there(viewer, rest):
    status, body = ask(viewer, root_of(viewer) + rest)
    assert status == 404 and "error" in json.loads(body)


def test_another_host_name_is_refused(viewer):
    """As when a page elsewhere has its own name resolve to this machine."""
    path = root_of(viewer)
    assert ask(viewer, path, Host=f"evil.example:{viewer.port}")[0] == 421
    assert ask(viewer, path, Host="127.0.0.1")[0] == 421
    assert ask(viewer, path, Host=f"localhost:{viewer.port}")[0] == 200


def test_only_reading(viewer):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(viewer, root_of(viewer), method)[0] == 501


def test_it_listens_on_this_machine_only(viewer):
    assert viewer._server.server_address[0] == "127.0.0.1"
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", viewer.port))


def test_a_damaged_tensor_is_an_answer(viewer, tmp_path):
    for file in (tmp_path / "one").glob("data-*"):
        data = bytearray(file.read_bytes())
        data[-8:] = b"\xff" * 8
        data[: len(data) // 2] = b"\0" * (len(data) // 2)
        file.write_bytes(data)
    status, body = ask(viewer, f"{root_of(viewer)}statistics?name={quote('a/b &?#', safe='')}&of=0")
    assert status == 500 and "error" in json.loads(body)


def test_closing_ends_it(tmp_path):
    save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "one")
    viewer = Viewer(page_of(Checkpoint(tmp_path / "one")), [])
    port = viewer.port
    with viewer:
        assert ask(viewer, root_of(viewer))[0] == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_what_is_no_address_is_answered(viewer, capfd):
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=30) as connection:
        connection.sendall(f"GET http://[x/ HTTP/1.1\r\nHost: 127.0.0.1:{viewer.port}\r\n\r\n".encode())
        assert b" 400 " in connection.recv(100)
    assert ask(viewer, root_of(viewer))[0] == 200
    said = capfd.readouterr().err
    assert "Traceback" not in said, said


def test_connections_that_say_nothing_keep_no_other_waiting(viewer):
    """They are established at once, also before the server accepts them; else the next one tries again after a second,
    and then later and later."""
    with contextlib.ExitStack() as opened:
        idle = Viewer(page_of(viewer._checkpoints[0]))  # does not accept yet
        opened.callback(idle.close)
        for _ in range(300):
            connection = opened.enter_context(socket.socket())
            connection.settimeout(10)
            connection.connect(("127.0.0.1", idle.port))
        with idle:
            assert ask(idle, root_of(idle))[0] == 200
