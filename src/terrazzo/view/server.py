"""A server for a page, on this machine only, which computes statistics on demand.

It listens on 127.0.0.1. Its address has a random part, which other users and pages do not know. A request must have
this machine as its host, so that pages of other hosts cannot reach it by a name of their own. It only reads.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from terrazzo.checkpoint import Checkpoint, LazyTensor
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.view.page import Page
from terrazzo.view.statistics import statistics

_LONGEST: Final = 100_000  # characters of a value that are shown
_IDLE: Final = 30.0  # time limit of a request, in seconds
_WAITING: Final = 1024  # connections that the kernel keeps until they are accepted


class Viewer(ShownAsCall):
    """Serves one page until it is closed.

    >>> from terrazzo.layout import Layout, Shard
    >>> from terrazzo.view.data.layout_data import SketchedMesh
    >>> from terrazzo.view import page_of
    >>> with Viewer(page_of(Layout.of(SketchedMesh((2,)), [Shard(0)], (4,)))) as viewer:
    ...     viewer.url.startswith("http://127.0.0.1:")
    True

    Args:
        page: the page to serve.
        checkpoints: the checkpoints whose statistics are computed: that of the page, or both that it compares.
        port: the port; 0 for a free one.
    """

    def __init__(self, page: Page, checkpoints: Sequence[Checkpoint] = (), port: int = 0) -> None:
        self._token = secrets.token_urlsafe(16)
        self._checkpoints = list(checkpoints)
        self._html = page.html(served=bool(self._checkpoints)).encode()
        self._reading = threading.Lock()  # reads one tensor at a time, which bounds memory
        self._server = _Server(self, port)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    def serve_forever(self) -> None:
        """Answer requests, until another thread calls `close` or the process is interrupted."""
        self._server.serve_forever()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, name="terrazzo-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    # ------------------------------------------------------------------ requests

    def answer(self, host: str, target: str) -> tuple[int, str, bytes]:
        """The status, content type and body for a request's host and path."""
        if host not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            return 421, "text/plain", b"this server answers only as 127.0.0.1"
        try:
            parts = urlsplit(target)
        except ValueError:
            return 400, "text/plain", b"this is not an address"
        token, _, what = parts.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 404, "text/plain", b"use the address that `terrazzo view` has printed"
        if not what:
            return 200, "text/html", self._html
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            found = self._asked(what, query)
        except Exception as error:  # a damaged checkpoint can cause any error; the page shows it
            return 500, "application/json", _json({"error": f"{type(error).__name__}: {error}"})
        if found is None:
            return 404, "application/json", _json({"error": "there is no value of this name"})
        return 200, "application/json", _json(found)

    def _asked(self, what: str, query: dict[str, str]) -> dict[str, Any] | None:
        name, which = query.get("name"), query.get("of", "0")
        if name is None or which not in map(str, range(len(self._checkpoints))):
            return None
        checkpoint = self._checkpoints[int(which)]
        if name not in checkpoint:
            return None
        with self._reading:
            value = checkpoint[name]
            if what == "statistics" and isinstance(value, LazyTensor):
                return statistics(value)
            if what == "value" and not isinstance(value, LazyTensor):
                text = value if isinstance(value, str) else repr(value)
                return {"type": type(value).__name__, "text": text[:_LONGEST], "longer": len(text) > _LONGEST}
        return None


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # More than a browser opens: with the usual 5, connections beyond them try again after seconds, and later ones more.
    request_queue_size = _WAITING

    def __init__(self, viewer: Viewer, port: int) -> None:
        self.viewer = viewer
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_version = "terrazzo"
    sys_version = ""
    timeout = _IDLE

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        status, kind, body = self.server.viewer.answer(self.headers.get("Host", ""), self.path)
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because every line would have the secret part of the address."""
