"""A proxy between a client and an S3 server that suffers faults: what happens between the two on bad days.

A fault is chosen per request by `choose(method, path, number)`, which returns None or one of

    ("status", 503)     the server is said to have answered so; it has not heard of the request
    ("lost", 0)         the server does what it is asked, and its answer is lost
    ("cut", 0)          the connection breaks in the middle of what the client sends
    ("cut reply", 0)    the connection breaks in the middle of the answer
    ("slow", seconds)   the answer takes its time
    ("flip", 0)         one bit of what the client sends arrives as another
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Fault = tuple[str, float]
_STATUS = {
    404: "NoSuchBucket",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


class FaultProxy:
    """Listens on loopback; `endpoint` is what clients are told."""

    def __init__(self, upstream: str) -> None:
        self.choose: Callable[[str, str, int], Fault | None] = lambda method, path, number: None
        self.seen: list[tuple[str, str]] = []
        self.happened: list[tuple[str, str, Fault]] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                proxy._handle(self, urlsplit(upstream))

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def settings(self, base: dict[str, str]) -> dict[str, Any]:
        """A client's settings, with this endpoint and little patience."""
        return base | {
            "endpoint": self.endpoint,
            "retry_config": {"max_retries": 3, "backoff": {"init_backoff": _ms(5), "max_backoff": _ms(20)}},
        }

    def reset(self, choose: Callable[[str, str, int], Fault | None]) -> None:
        """Count requests from here on."""
        with self._lock:
            self.choose, self.seen, self.happened = choose, [], []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, client: BaseHTTPRequestHandler, upstream: Any) -> None:
        with self._lock:
            number = len(self.seen)
            self.seen.append((client.command, client.path))
            fault = self.choose(client.command, client.path, number)
            if fault is not None:
                self.happened.append((client.command, client.path, fault))
        kind, amount = fault or ("", 0.0)
        length = int(client.headers.get("Content-Length") or 0)
        if kind == "cut":
            client.rfile.read(length // 2)
            client.close_connection = True
            return
        body = client.rfile.read(length)
        if kind == "flip" and body:
            body = body[: length // 2] + bytes([body[length // 2] ^ 1]) + body[length // 2 + 1 :]
        if kind == "status":
            text = f"<Error><Code>{_STATUS[int(amount)]}</Code></Error>".encode()
            self._answer(client, int(amount), {"Content-Type": "application/xml"}, text)
            return
        connection = http.client.HTTPConnection(upstream.hostname, upstream.port, timeout=30)
        connection.request(client.command, client.path, body, dict(client.headers))
        reply = connection.getresponse()
        data, headers = reply.read(), dict(reply.getheaders())
        connection.close()
        if kind == "slow":
            time.sleep(amount)
        if kind == "lost":
            client.close_connection = True
            return
        self._answer(client, reply.status, headers, data, half=kind == "cut reply")

    def _answer(
        self, client: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, *, half: bool = False
    ) -> None:
        client.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                client.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if client.command == "HEAD" else str(len(data))
        client.send_header("Content-Length", length)
        client.end_headers()
        if client.command == "HEAD":
            client.close_connection = half
            return
        client.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            client.close_connection = True


def _ms(count: int) -> Any:
    from datetime import timedelta

    return timedelta(milliseconds=count)
