"""Where two groups of ranks find each other, that may have been started apart: a small store at an address.

publisher            who publishes now: a name of its own
<publisher>/parts    what there is, and which of its ranks has what
current              the version that it has to give
receivers            how many groups of receivers have come so far; each gets a number
receiver/<n>         what the ranks of one want, and from which publisher
ask/<n>/<k>          the k-th time that it asks for the current version
gone/<n>             it will not ask again
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

TRANSFER_LIMIT: Final = timedelta(minutes=2)  # unless somebody says otherwise
_LOOK_SECONDS: Final = 2.0

Answer = TypeVar("Answer")


class Channel:
    """An address at which a publisher and receivers meet, to send weights directly.

    The publisher's first rank answers there, so it has to run on this host; unless somebody else already does: a
    process that lives longer, with a `torch.distributed.TCPStore` of its own.

    Args:
        address: "host:port".
        bucket_bytes: What is under way at once takes no more memory on any rank.

    >>> Channel("localhost:29600").address
    'localhost:29600'
    """

    def __init__(self, address: str, *, bucket_bytes: int = 64 << 20) -> None:
        host, mark, port = address.rpartition(":")
        if not mark or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PublishValueError(f"{address!r} is no address: pass 'host:port'")
        if bucket_bytes < 1 << 10:
            raise PublishValueError(f"bucket_bytes={bucket_bytes}: pass 1024 or more")
        self.address = address
        self.bucket_bytes = bucket_bytes
        self._host, self._port = host.removeprefix("tcp://").strip("[]"), int(port)

    def __str__(self) -> str:
        return self.address

    def serve(self, timeout: timedelta) -> Board:
        """What hangs at the address; from now on it is this process that answers there, unless somebody does."""
        if self.answers():
            return self.connect(timeout)
        try:
            own = TCPStore(self._host, self._port, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise CommError(
                f"nobody answers at {self.address}, and this process cannot: {error}; the publisher's first rank has "
                f"to run on that host, and the port has to be free"
            ) from error
        return Board(lambda: own, self.address, timeout)

    def connect(self, timeout: timedelta) -> Board:
        """What hangs at the address."""
        return Board(
            lambda: TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout),
            self.address,
            timeout,
        )

    def answers(self) -> bool:
        """Whether somebody is there now."""
        try:
            with socket.create_connection((self._host, self._port), timeout=_LOOK_SECONDS):
                return True
        except OSError:
            return False


class Board:
    """The store at an address, of which every question has a time limit.

    Torch waits without one for a server that accepts a connection and says nothing: one of another kind, or one that
    has been stopped.  So questions are asked by a thread of their own.
    """

    def __init__(self, make: Callable[[], Store], address: str, timeout: timedelta) -> None:
        self._address = address
        self._timeout = timeout
        self._broken: str | None = None
        self._questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(self._questions,), name="terrazzo-channel", daemon=True).start()
        self.store: Store = PrefixStore("terrazzo/publish", self._ask(make))

    def value(self, key: str) -> bytes | None:
        """What is under a key; None, at once, if nothing is."""

        def look() -> bytes | None:
            return bytes.fromhex(self.store.get(key).decode()) if self.store.check([key]) else None

        return self._ask(look)

    def has(self, key: str) -> bool:
        """Whether something is under a key."""
        return self._ask(lambda: self.store.check([key]))

    def put(self, key: str, value: bytes) -> None:
        """Put something under a key."""
        self._ask(lambda: self.store.set(key, value.hex()))

    def count(self, key: str, more: int) -> int:
        """Count, and say how many there are."""
        return self._ask(lambda: int(self.store.add(key, more)))

    def close(self) -> None:
        """Ask no more."""
        self._broken = self._broken or "it was closed"
        self._questions.put(None)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._broken is not None:
            raise CommError(f"the store at {self._address} is not asked any more: {self._broken}")
        future: Future[Answer] = Future()
        self._questions.put((future, question))
        try:
            return future.result(self._timeout.total_seconds())
        except FutureTimeout as error:
            self._broken = f"it gave no answer within {self._timeout.total_seconds():g} s"
            raise CommTimeout(f"nobody answers at {self._address}: {self._broken}; is it another server?") from error
        except RuntimeError as error:
            self._broken = str(error).partition("\n")[0]
            raise CommError(f"nobody answers at {self._address}: {self._broken}") from error


def _answer(questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (asked := questions.get()) is not None:
        future, question = asked
        try:
            future.set_result(question())
        except Exception as error:
            future.set_exception(error)
        del asked, future, question
