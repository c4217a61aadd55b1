"""A publisher and its receivers, which are started separately, find each other through a `TCPStore` at an address.

Its keys:

publisher                the name of the publisher that publishes now
<publisher>/parts        the tensors that it publishes, and which of its ranks has which boxes
current                  the version that it sends now
<publisher>/requests     a queue of what groups of receivers ask of it

Other processes may write there, too, so the publisher takes nothing that it finds there for granted.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed import PrefixStore, QueueEmptyError, Store, TCPStore

from terrazzo.errors import CommError, CommTimeout, PublishValueError
from terrazzo.publish.gate import SECRET, Gate, enter, relayed, secret_of

TRANSFER_LIMIT: Final = timedelta(minutes=2)  # default of `timeout`
_LOOK_SECONDS: Final = 2.0

Answer = TypeVar("Answer")


class Channel:
    """An address at which a publisher and receivers meet, to send weights directly.

    The publisher's first rank starts a store at the address, so it has to run on that host; unless another process
    has already started one there with `serve`.

    At a loopback address ("localhost:29600", "127.0.0.1:29600") only processes of the same host can connect. At any
    other address a secret is required, because whoever reaches the port could read and replace the weights: only
    processes that have it are connected. The weights themselves are not encrypted.

    Args:
        address: "host:port".
        bucket_bytes: The most memory that a rank uses for messages on their way to, or in, one group of receivers.
        secret: The same on both sides. Default: the environment variable `TERRAZZO_PUBLISH_SECRET`.

    >>> Channel("localhost:29600").address
    'localhost:29600'
    """

    def __init__(self, address: str, *, bucket_bytes: int = 64 << 20, secret: str | None = None) -> None:
        host, mark, port = address.rpartition(":")
        if not mark or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PublishValueError(f"the address must be 'host:port', not {address!r}")
        if bucket_bytes < 1 << 10:
            raise PublishValueError(f"bucket_bytes must be 1024 or more, not {bucket_bytes}")
        self.address = address
        self.bucket_bytes = bucket_bytes
        self._host, self._port = host.removeprefix("tcp://").strip("[]"), int(port)
        self._host = "127.0.0.1" if self._host == "localhost" else self._host
        self._secret = secret_of(secret)
        if not self._secret and not self.is_loopback:
            raise PublishValueError(
                f"other hosts can reach {address}, so a secret is required: set {SECRET}, or pass secret=, the same "
                "for the publisher and its receivers (`python -c 'import secrets; print(secrets.token_hex())'` prints "
                "a new one); or use a loopback address, if all of them run on one host"
            )

    def __str__(self) -> str:
        return self.address

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can connect."""
        try:
            return ipaddress.ip_address(self._host).is_loopback
        except ValueError:
            return False  # a name

    @property
    def own_address(self) -> str | None:
        """The address at which transfers listen; None: that by which other hosts reach this one."""
        return self._host if self.is_loopback else None

    def serve(self, timeout: timedelta = TRANSFER_LIMIT) -> TimedStore:
        """The store at the address, which this process starts unless there is one. It lives as long as what is
        returned."""
        if self.answers():
            return self.connect(timeout)
        try:
            listening = self._listen()
            if not self._secret:
                return self._started(listening, timeout)
            inner = socket.create_server(("127.0.0.1", 0))
            port = inner.getsockname()[1]
            store = self._started(inner, timeout)
        except (RuntimeError, OSError) as error:
            raise CommError(
                f"there is no store at {self.address}, and this process cannot start one: {error}. The publisher's "
                "first rank must run on that host, and the port must be free"
            ) from error
        store.gate = Gate(listening, port, self._secret)
        return store

    def _listen(self) -> socket.socket:
        """A loopback address stays one. Others may be of a proxy, or names: then all interfaces have to listen."""
        if self.is_loopback:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            return socket.create_server((self._host, self._port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", self._port))

    def _started(self, listening: socket.socket, timeout: timedelta) -> TimedStore:
        """A store that listens there: by itself it would listen on all interfaces."""
        host, port = listening.getsockname()[:2]
        own = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
        return TimedStore(lambda: own, self.address, timeout)

    def connect(self, timeout: timedelta) -> TimedStore:
        """The store that another process started at the address."""

        def make() -> TCPStore:
            host, port = self._host, self._port
            if self._secret:
                host, port = "127.0.0.1", relayed(enter(host, port, self._secret, timeout.total_seconds()))
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

        return TimedStore(make, self.address, timeout)

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
        self.gate: Gate | None = None  # through which others come to a store of this process
        self._questions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(self._questions,), name="terrazzo-channel", daemon=True).start()
        self.store: Store = PrefixStore("terrazzo/publish", self._ask(make))

    def value(self, key: str) -> bytes | None:
        """The value of a key; None, without waiting, if it has none."""

        def look() -> bytes | None:
            return bytes.fromhex(self.store.get(key).decode()) if self.store.check([key]) else None

        try:
            return self._ask(look)
        except ValueError as error:
            raise CommError(f"the store at {self._address} has a value for {key!r} that is not terrazzo's") from error

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._ask(lambda: self.store.set(key, value.hex()))

    def push(self, queue: str, value: bytes) -> None:
        """Add a value to the end of a queue."""
        self._ask(lambda: self.store.queue_push(queue, value.hex()))

    def pop(self, queue: str) -> bytes | None:
        """Take the first value of a queue; None, without waiting, if it is empty; empty if it is not one of `push`."""

        def take() -> bytes | None:
            try:
                return bytes.fromhex(self.store.queue_pop(queue, False).decode())
            except QueueEmptyError:
                return None
            except ValueError:
                return b""

        return self._ask(take)

    def close(self) -> None:
        """End the thread, and let nobody come to a store of this process any more."""
        self._broken = self._broken or "it was closed"
        self._questions.put(None)
        if self.gate is not None:
            self.gate.close()

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
        except CommError as error:
            self._broken = str(error)
            raise
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
