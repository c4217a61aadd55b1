"""A real S3 server on this machine, for tests: SeaweedFS, on loopback, with ports of its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

KEY, SECRET, BUCKET = "test-key", "test-secret", "checkpoints"


def program() -> str | None:
    """Where the server is, if it is installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system hands out by itself."""
    found: list[int] = []
    start = 12_000 + (os.getpid() * 37) % 15_000
    for port in range(start, start + 5000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class S3Server:
    """A running server with one empty bucket, whose files are in `folder`."""

    endpoint: str = ""
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="s3-"))
    _process: subprocess.Popen[bytes] | None = None
    _ports: list[int] = field(default_factory=list)

    def start(self) -> S3Server:
        """Start, and wait until it answers."""
        folder = Path(self.folder)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        parts = ["master", "volume", "filer", "s3"]
        self._ports = ports = free_ports(2 * len(parts) + 2)
        options = [f"-{part}.port={ports[2 * n]}" for n, part in enumerate(parts)]
        options += [f"-{part}.port.grpc={ports[2 * n + 1]}" for n, part in enumerate(parts)]
        command = [
            str(program()), f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-s3", f"-s3.config={folder / 's3.json'}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=256",
            "-volume.max=0", *options,
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, start_new_session=True, preexec_fn=_die_with_parent
            )
        self.endpoint = f"http://127.0.0.1:{ports[6]}"
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop(keep=True)
                raise RuntimeError(f"the S3 server did not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def _ready(self) -> bool:
        from obstore.store import S3Store

        try:
            urllib.request.urlopen(self.endpoint, timeout=2)
        except urllib.error.HTTPError:
            pass  # it answers
        except OSError:
            return False
        options: Any = self.settings() | {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
        store = S3Store(BUCKET, **options)
        try:
            store.put("ready", b"")
        except Exception:
            self._make_bucket()
            return False
        store.delete("ready")
        return True

    def _make_bucket(self) -> None:
        import obstore
        from obstore.store import S3Store

        # A bucket is made by a put without a key, signed as any other.
        settings: Any = self.settings()
        url = obstore.sign(S3Store(BUCKET, **settings), "PUT", "", expires_in=timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5)
        except OSError:
            pass

    def settings(self) -> dict[str, str]:
        """What a client needs to know."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }

    def environment(self) -> dict[str, str]:
        """The same, as the usual environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def stop(self, *, keep: bool = False) -> None:
        """End the server and remove its files."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for port in self._ports:  # its sockets, most of which no option puts elsewhere
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
