"""A publisher and its receivers, which are started separately, find each other through a `TCPStore` at an address.

Its keys:

publisher                the name of the publisher that publishes now
<publisher>/parts        the tensors that it publishes, and which of its ranks has which boxes
current                  the version that it sends now
receivers                the number of groups of receivers so far, which numbers them
receiver/<n>             the boxes that the ranks of group n need, and the publisher that it asks
ask/<n>/<k>              group n asks for the current version for the k-th time
gone/<publisher>/<n>     group n will not ask again
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from terrazzo.errors import CommError, CommTimeout, PublishValueError

TRANSFER_LIMIT: Final = timedelta(minutes=2)  # default of `timeout`
_LOOK_SECONDS: Final = 2.0

Answer = TypeVar("Answer")


class Channel:
    """An address at which a publisher and receivers meet, to send weights directly.

    The publisher's first rank starts a `torch.distributed.TCPStore` at the address, so it has to run on that host;
    unless a process that in_model longer has already started one there.

    Args:
        address: "host:port".
        bucket_bytes: The most memory that a rank uses for messages that are being sent or received.

    >>> Channel("localhost:29600").address
    'localhost:29600'
    """

    def __init__(self, address: str, *, bucket_bytes: int = 64 << 20) -> None:
        host, mark, port = address.rpartition(":")
        if not mark or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PublishValueError(f"the address must be 'host:port', not {address!r}")
        if bucket_bytes < 1 << 10:
            raise PublishValueError(f"bucket_bytes must be 1024 or more, not {bucket_bytes}")
        self.address = address
        self.bucket_bytes = bucket_bytes
        self._host, self._port = host.removeprefix("tcp://").strip("[]"), int(port)

    def __str__(self) -> str:
        return self.address

    def serve(self, timeout: timedelta) -> TimedStore:
        """The store at the address, which this process starts unless there is one."""
        if self.answers():
            return self.connect(timeout)
        try:
            own = TCPStore(self._host, self._port, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise CommError(
                f"there is no store at {self.address}, and this process cannot start one: {error}. The publisher's "
                "first rank must run on that host, and the port must be free"
            ) from error
        return TimedStore(lambda: own, self.address, timeout)

    def connect(self, timeout: timedelta) -> TimedStore:
        """The store that another process started at the address."""
        return TimedStore(
            lambda: TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout),
            self.address,
            timeout,
        )

    def answers(self) -> bool:
        """Whether a process listens at the address now."""
        try:
            with socket.create_connection((self._host, self._port), timeout=_LOOK_SECONDS):
                return True
        except OSError:
            return False


class TimedStore:
    """A `TCPStore`, each of whose calls has a time limit.

    torch itself waits without a limit for a server that accepts a connection and sends nothing, because it is a server
    of another kind or a stopped process. So a thread makes the calls, and the caller waits for it with a time limit.
    """

    def __init__(self, make: Callable[[], Store], address: str, timeout: timedelta) -> None:
        self._address = address
        self._timeout = timeout
        self._broken: str | None = None
        self._questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(self._questions,), name="terrazzo-channel", daemon=True).start()
        self.store: Store = PrefixStore("terrazzo/publish", self._ask(make))

    def value(self, key: str) -> bytes | None:
        """The value of a key; None, without waiting, if it has none."""

        def look() -> bytes | None:
            return bytes.fromhex(self.store.get(key).decode()) if self.store.check([key]) else None

        return self._ask(look)

    def has(self, key: str) -> bool:
        """Whether a key has a value."""
        return self._ask(lambda: self.store.check([key]))

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._ask(lambda: self.store.set(key, value.hex()))

    def count(self, key: str, more: int) -> int:
        """Add to a counter, and return its new value."""
        return self._ask(lambda: int(self.store.add(key, more)))

    def close(self) -> None:
        """End the thread."""
        self._broken = self._broken or "it was closed"
        self._questions.put(None)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._broken is not None:
            raise CommError(f"the store at {self._address} cannot be used any more: {self._broken}")
        future: Future[Answer] = Future()
        self._questions.put((future, question))
        try:
            return future.result(self._timeout.total_seconds())
        except FutureTimeout as error:
            self._broken = f"it did not answer within {self._timeout.total_seconds():g} s"
            raise CommTimeout(
                f"the store at {self._address} failed: {self._broken}; is this the port of another server?"
            ) from error
        except RuntimeError as error:
            self._broken = str(error).partition("\n")[0]
            raise CommError(f"the store at {self._address} failed: {self._broken}") from error


def _answer(questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (asked := questions.get()) is not None:
        future, question = asked
        try:
            future.set_result(question())
        except Exception as error:
            future.set_exception(error)
        del asked, future, question
