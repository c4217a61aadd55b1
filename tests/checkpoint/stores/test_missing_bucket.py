"""A bucket that does not exist is neither an empty one nor a conflict with another save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from terrazzo.checkpoint import CheckpointManager, save
from terrazzo.checkpoint.stores import ABSENT, Store, store_at
from terrazzo.errors import CheckpointError, CheckpointIOError
from terrazzo.publish import Publisher


class NoBucket(BaseHTTPRequestHandler):
    """Answers as S3 does; without its text where there can be none."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
        body = b"" if self.command == "PUT" else body
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoBucket)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def settings(endpoint: str) -> dict:
    options = {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": "eu-west-1"}
    return {**options, "client_options": {"allow_http": True}}


@pytest.mark.parametrize(
    "request_of",
    [
        lambda store: store.put("a", b"1"),
        lambda store: store.put("a", b"1", only_if=ABSENT),
        lambda store: store.lease("a.lease"),
        lambda store: store.get("a"),
        lambda store: store.list(),
        lambda store: store.folders(),
    ],
)
def test_each_request_says_so(endpoint: str, request_of: Callable[[Store], object]):
    store = store_at("s3://chekpoints/run", **settings(endpoint))
    with pytest.raises(CheckpointIOError, match="there is no bucket or container 'chekpoints'") as caught:
        request_of(store)
    assert not isinstance(caught.value, FileNotFoundError), "which would mean that a file is absent"


def test_so_do_saves(endpoint: str, tmp_path: Path):
    store = store_at("s3://chekpoints/run", **settings(endpoint))
    for work in (
        lambda: save({"w": torch.ones(2)}, store=store),
        lambda: CheckpointManager(store),
        lambda: Publisher(store, {"w": torch.ones(2)}),
    ):
        with pytest.raises(CheckpointError, match="there is no bucket or container 'chekpoints'"):
            work()
