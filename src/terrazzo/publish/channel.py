"""A publisher and its receivers, which are started separately, find each other at an address; and what they exchange.

A process listens there (`comm.serving`), and keeps two values: the name of the publisher that publishes now, and its
listing: the tensors, which of its ranks has which boxes, and where these listen.

A receiver's rank asks the publisher's ranks for boxes, in messages of bounded size. A box that it needs is cut at the
boundaries of the publisher's boxes, and into pieces that fit into a message; neighbouring pieces share a message. The
sender converts, if the receiver's dtype is smaller than the published one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.native.tensors import as_bytes, can_convert, dtype_from_name, dtype_name
from terrazzo.comm.addresses import listen_at, own_address
from terrazzo.comm.serving import Address, Client, Server, Session, WrongSecretError
from terrazzo.errors import CommError, PublishError, PublishValueError, TerrazzoError
from terrazzo.layout import Box
from terrazzo.layout.box import make_up, row_major_windows
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.publish.host_copy import Snapshot, aligned
from terrazzo.publish.parts import ListedBox

SECRET: Final = "TERRAZZO_PUBLISH_SECRET"
TRANSFER_LIMIT: Final = timedelta(minutes=2)  # default of `timeout`
_LOOK_SECONDS: Final = 2.0
_KEYS: Final = ("name", "listing")


class Channel(ShownAsCall):
    """An address at which a publisher and receivers meet, to send weights directly.

    The publisher's first rank listens at the address, so it has to run on that host; unless another process already
    does so, by `serve`.

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
        self._shared = os.environ.get(SECRET, "") if secret is None else secret
        if not self._shared and not self.is_loopback:
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
        with suppress(ValueError):  # of a name
            return ipaddress.ip_address(self._host).is_loopback
        return False

    def serve(self, timeout: timedelta = TRANSFER_LIMIT) -> Board:
        """The board at the address, which this process keeps unless another one does: as long as what is returned is
        open."""
        if self.answers():
            return self.connect(timeout)
        values: dict[str, bytes] = {}
        try:
            server = self._server(self._listen(), lambda: _Values(values), timeout)
        except OSError as error:
            raise CommError(
                f"no process listens at {self.address}, and this one cannot: {error}. The publisher's first rank must "
                "run on that host, and the port must be free"
            ) from error
        return Board(self, timeout, server)

    def connect(self, timeout: timedelta) -> Board:
        """The board that another process keeps at the address."""
        return Board(self, timeout)

    def client(self, timeout: timedelta, where: tuple[str, int] | None = None) -> Client:
        """Calls to the process that listens at the address, or to a rank of the publisher that listens there."""
        host, port = where or (self._host, self._port)
        return Client(Address(host, port, self._shared.encode()), timeout.total_seconds())

    def serve_beside(self, session: Callable[[], Session], timeout: timedelta) -> tuple[Server, str, int]:
        """A server of this rank's own, and where others reach it: of a loopback address, only from this host."""
        host = self._host if self.is_loopback else own_address()
        listening = listen_at(host)
        return self._server(listening, session, timeout), host, int(listening.getsockname()[1])

    def _server(self, listening: socket.socket, session: Callable[[], Session], timeout: timedelta) -> Server:
        return Server(listening, self._shared.encode(), session, timeout.total_seconds())

    def _listen(self) -> socket.socket:
        """A loopback address stays one. Others may be of a proxy, or names: then all interfaces have to listen."""
        if self.is_loopback:
            return listen_at(self._host, self._port)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", self._port))

    def answers(self) -> bool:
        """Whether a process listens at the address now."""
        with suppress(OSError), socket.create_connection((self._host, self._port), timeout=_LOOK_SECONDS):
            return True
        return False


class Board:
    """The values at a channel's address."""

    def __init__(self, channel: Channel, timeout: timedelta, server: Server | None = None) -> None:
        self._channel = channel
        self._client = channel.client(timeout)
        self._server = server  # if this process keeps the values

    def value(self, key: str) -> bytes:
        """The value of a key; empty if it has none."""
        return bytes(called(self._channel, self._client, "get", key) or b"")

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        called(self._channel, self._client, "put", key, data=[memoryview(value)], follows=len(value))

    def close(self) -> None:
        """Close the connection. The values of this process are not there any more."""
        self._client.close()
        if self._server is not None:
            self._server.close()


class _Values:
    """The operations on the values."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        match operation, arguments:
            case "get", (str(key),):
                return bytearray(self._values.get(key, b""))
            case "put", (str(key),) if key in _KEYS:
                self._values[key] = b"".join(follows)
                return None
        raise ValueError(f"there is no operation {operation} {arguments}")

    def close(self) -> None:
        """Do nothing: a connection holds nothing."""


def called(channel: Channel, client: Client, operation: str, *arguments: Any, **bytes_with_it: Any) -> Any:
    """The result of a call to a process of a channel; `CommError` if it fails."""
    try:
        return client.call(operation, *arguments, **bytes_with_it)
    except WrongSecretError as error:
        raise CommError(f"{error}: pass the same secret=, or set the same {SECRET}, on both sides") from error
    except OSError as error:
        raise CommError(f"a call to {channel} failed: {error}") from error


# ------------------------------------------------------------------ messages


class AskedBox(msgspec.Struct, array_like=True, frozen=True):
    """A box in a message: the index of the sender's box that contains it, and its dtype on the way."""

    source: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True)
class Message:
    """What a receiver's rank asks of a sender at once, and for each box the index of the receiver's own."""

    sender: int
    asked: tuple[AskedBox, ...]
    targets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.asked)

    def views(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """The boxes in the message's bytes."""
        return _views(data, self.asked)


def plan_messages(
    held: Sequence[Sequence[ListedBox]],
    wanted: Sequence[tuple[str, Box, torch.dtype]],
    dtypes: Mapping[str, torch.dtype],
    message_bytes: int,
) -> list[Message]:
    """The messages with which a receiver's rank gets the boxes that it needs.

    >>> held = [[ListedBox("w", (0,), (2,))], [ListedBox("w", (2,), (2,))]]
    >>> for message in plan_messages(held, [("w", Box((1,), (3,)), torch.float32)], {"w": torch.float32}, 1 << 20):
    ...     print(message.sender, message.asked[0].box)
    0 Box(offsets=(1,), lengths=(1,))
    1 Box(offsets=(2,), lengths=(2,))
    """
    by_name: dict[str, list[tuple[int, int, Box]]] = {}
    for rank, has_all in enumerate(held):
        for place, each in enumerate(has_all):
            by_name.setdefault(each.name, []).append((rank, place, Box(each.offsets, each.lengths)))
    pairs: dict[int, list[tuple[AskedBox, int]]] = {}
    for target, (name, box, dtype) in enumerate(wanted):
        on_the_way = dtype if dtype.itemsize < dtypes[name].itemsize else dtypes[name]
        commons: list[Box] = []
        for rank, source, has in by_name.get(name, ()):
            common = box.intersect(has)
            if common is None:
                continue
            commons.append(common)
            for window in row_major_windows(common.lengths, max(message_bytes // on_the_way.itemsize, 1)):
                offsets, lengths = window.shifted(common.offsets).offsets, window.lengths
                pairs.setdefault(rank, []).append((AskedBox(source, offsets, lengths, dtype_name(on_the_way)), target))
        if not make_up(box, commons):
            lacking = box.numel - sum([common.numel for common in commons])
            why = f"no sender has {lacking} elements of" if lacking > 0 else "several senders have elements of"
            raise PublishError(f"{name}: {why} {box}")
    return [message for rank, pieces in sorted(pairs.items()) for message in _messages(rank, pieces, message_bytes)]


def _messages(sender: int, pieces: Sequence[tuple[AskedBox, int]], limit: int) -> Iterator[Message]:
    start = 0
    together: list[tuple[AskedBox, int]] = []
    for asked, target in pieces:
        nbytes = asked.box.numel * dtype_from_name(asked.dtype).itemsize
        if together and start + nbytes > limit:
            yield Message(sender, *map(tuple, zip(*together, strict=True)))
            start, together = 0, []
        together.append((asked, target))
        start = aligned(start + nbytes)
    yield Message(sender, *map(tuple, zip(*together, strict=True)))


@torch.no_grad()
def packed(asked: Sequence[AskedBox], snapshot: Snapshot, most: int) -> torch.Tensor:
    """The bytes of a message; `PublishError` if that is not published, or has more than `most` bytes."""
    _check(asked, snapshot)
    nbytes = nbytes_of(asked)
    if nbytes > most:
        raise PublishError(
            f"a receiver asks for {nbytes} bytes at once, and at most {most} are sent: the channels of both must have "
            "the same bucket_bytes"
        )
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    pack(data, asked, snapshot.boxes, snapshot.tensors)
    return data


def pack(data: torch.Tensor, asked: Sequence[AskedBox], boxes: Sequence[Box], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the boxes of a message into its bytes, from the sender's tensors, of which each is one of its boxes."""
    for each, view in zip(asked, _views(data, asked), strict=True):
        source = tensors[each.source][each.box.relative_to(boxes[each.source]).slices()]
        as_bytes(view).copy_(as_bytes(source))


def _check(asked: Sequence[AskedBox], snapshot: Snapshot) -> None:
    for each in asked:
        try:
            box, tensor = snapshot.boxes[each.source], snapshot.tensors[each.source]
            fits = each.source >= 0 and box.contains(each.box) and not each.box.is_empty
            fits = fits and can_convert(tensor.dtype, dtype_from_name(each.dtype))
        except (IndexError, ValueError, TypeError, KeyError, TerrazzoError) as error:
            raise PublishError(f"a receiver asks for {each}: {error}") from error
        if not fits:
            raise PublishError(
                f"a receiver asks for {each}, which does not fit the {tensor.dtype} box {box} of "
                f"{snapshot.names[each.source]!r}"
            )


def nbytes_of(asked: Sequence[AskedBox]) -> int:
    """The length of a message."""
    return _starts(asked)[1]


def _starts(asked: Sequence[AskedBox]) -> tuple[list[int], int]:
    """Where each box begins in a message, and the message's bytes."""
    starts, end = [], 0
    for each in asked:
        starts.append(aligned(end))
        end = starts[-1] + each.box.numel * dtype_from_name(each.dtype).itemsize
    return starts, end


def _views(data: torch.Tensor, asked: Sequence[AskedBox]) -> Iterator[torch.Tensor]:
    for start, each in zip(_starts(asked)[0], asked, strict=True):
        dtype = dtype_from_name(each.dtype)
        yield data[start : start + each.box.numel * dtype.itemsize].view(dtype).view(each.lengths)
