"""Publish directly: receivers read the publisher's last snapshot from the ranks that have it, each the boxes it needs.

The training loop does not wait for receivers. Each rank has a server; a group of receivers joins at all of them, and
holds a version there while it reads. A snapshot that is held does not change: the next version gets other memory. A
group that is late, or whose connection ends, holds nothing any more.

What receivers ask for may be wrong. It is checked, and refused; the publisher goes on.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, Final

import msgspec
import torch

from terrazzo._threads import results_of
from terrazzo.checkpoint.native.tensors import as_bytes, bytes_of, dtype_from_name, dtype_name
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.comm.serving import Client, Server
from terrazzo.errors import CommError, CommTimeout, PublishError
from terrazzo.publish.channel import AskedBox, Board, Channel, Message, called, packed, plan_messages
from terrazzo.publish.host_copy import HostCopy, Match, Snapshot
from terrazzo.publish.parts import ListedBox, PublishedShares, TensorInfo
from terrazzo.publish.versions import LOGGER, Version

_LOOK: Final = 0.01  # seconds between two tries to hold a version, or looks whether receivers have the last one
_MOMENT: Final = 1.0  # seconds
_PATIENCE: Final = 10.0  # seconds for which `close` waits for receivers that do nothing
_VERSIONS: Final = 3  # that are held at once, each in memory of its own


def _moment(timeout: timedelta) -> float:
    """Seconds after which a first rank that waits for the other side sends its own ranks a message: their time limit is
    the same."""
    return min(timeout.total_seconds() / 4, _MOMENT)


class PublisherListing(msgspec.Struct, array_like=True, frozen=True):
    """The published tensors, the boxes that each of the publisher's ranks has, and where these ranks listen."""

    infos: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    held: list[list[ListedBox]]
    servers: list[tuple[str, int]]

    def tensors(self) -> dict[str, TensorInfo]:
        """The published tensors."""
        return {name: TensorInfo(dtype_from_name(dtype), shape) for name, (dtype, shape) in self.infos.items()}


@dataclass(slots=True)
class _Group:
    """A group of receivers, on one rank of the publisher."""

    taken: int = 0  # the last version that it has
    sequence: int = 0  # the version that it holds
    snapshot: Snapshot | None = None
    reads: int = 0  # that are under way
    active: float = 0.0  # when it did something


class ChannelSender:
    """Publishes through a channel, on one rank."""

    snapshots = 1

    def __init__(self, channel: Channel, timeout: timedelta) -> None:
        self._channel = channel
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._board: Board | None = None  # on the first rank
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._offer = Version(0, 0, self._name, None, 0, 0)  # the last version; its place is how many there were
        self._offered: Snapshot | None = None  # what can be held now
        self._sent = 0  # bytes of the last version
        self._progress = time.monotonic()  # when receivers did something

    def begin(self, team: Team, shares: PublishedShares) -> int | None:
        """Listen, and list at the channel's address what this publisher has. Returns None: there is no earlier
        version."""

        def serve() -> bytes:
            if team.is_coordinator:
                self._board = self._channel.serve(self._timeout)
            self._server, *where = self._channel.serve_beside(lambda: _Session(self), self._timeout)
            return msgspec.msgpack.encode(where)

        def tell(parts: list[bytes]) -> None:
            infos = {name: (dtype_name(info.dtype), info.shape) for name, info in shares.infos.items()}
            servers = [msgspec.msgpack.decode(part, type=tuple[str, int]) for part in parts]
            listing = PublisherListing(infos, shares.aliases, shares.held, servers)
            assert self._board is not None
            self._board.put("listing", msgspec.msgpack.encode(listing))
            self._board.put("name", self._name.encode())

        try:
            team.reduce(serve, tell)
        except BaseException:
            self.close()
            raise
        return None

    def announce(self) -> None:
        """Raise if another publisher has replaced this one. Called on the first rank."""
        if not self._is_listed():
            raise CommError(
                f"another publisher has begun to publish at {self._channel}, so this one cannot go on: close it, or "
                "give each publisher an address of its own"
            )

    def _is_listed(self) -> bool:
        return self._board is not None and self._board.value("name").decode(errors="replace") == self._name

    def settle(self) -> None:
        """Offer nothing: the snapshot will change, unless it is held."""
        with self._lock:
            self._offered = None

    def reads(self, snapshot: Snapshot) -> bool:
        """Whether receivers hold this snapshot, which must not change then."""
        with self._lock:
            self._drop_late()
            return any(group.snapshot is snapshot for group in self._groups.values())

    def send(self, team: Team, number: int, new: Snapshot, old: Snapshot | None) -> Version:
        """Offer a snapshot, which all ranks have taken."""
        with self._lock:
            self._offer = Version(number, self._offer.place + 1, self._name, None, 0, new.nbytes)
            self._offered, self._sent = new, 0
            return self._offer

    # ------------------------------------------------------------------ what receivers ask

    def join(self, group: str) -> None:
        """Let a group of receivers hold versions, until `leave`."""
        with self._lock:
            if group in self._groups or not group:
                raise PublishError(f"group {group!r} of receivers cannot join: the name is taken, or empty")
            self._groups[group] = _Group()
            self._progress = time.monotonic()

    def leave(self, group: str) -> None:
        """Forget a group of receivers."""
        with self._lock:
            self._groups.pop(group, None)

    def latest(self) -> Version:
        """The last version; its place is 0 if there is none."""
        with self._lock:
            return self._offer

    def hold(self, group: str, sequence: int | None) -> Version | None:
        """Hold the last version, which has this number in sequence, if given; None if that cannot be now."""
        with self._lock:
            known = self._known(group)
            self._drop_late()
            held = {each.sequence for each in self._groups.values() if each.snapshot is not None}
            if self._offered is None or sequence not in (None, self._offer.place):
                return None
            if len(held | {self._offer.place}) > _VERSIONS:
                return None
            known.sequence, known.snapshot = self._offer.place, self._offered
            return self._offer

    def read(self, group: str, sequence: int, asked: list[AskedBox]) -> memoryview:
        """The bytes of these boxes, of the version that the group holds."""
        with self._lock:
            known = self._known(group)
            snapshot = known.snapshot
            if snapshot is None or known.sequence != sequence:
                raise PublishError(f"group {group!r} of receivers does not hold version {sequence}: it was late")
            known.reads += 1
        try:
            data = packed(asked, snapshot, self._channel.bucket_bytes)
        finally:
            with self._lock:
                known.reads -= 1
        with self._lock:
            if sequence == self._offer.place:
                self._sent += data.numel()
        return bytes_of(data)

    def release(self, group: str, taken: bool) -> None:
        """End `hold`: the version may be replaced. `taken`: the group has received all of it."""
        with self._lock:
            known = self._known(group)
            known.snapshot = None
            if taken:
                known.taken = known.sequence

    def _known(self, group: str) -> _Group:
        known = self._groups.get(group)
        if known is None:
            raise PublishError(f"there is no group {group!r} of receivers")
        self._progress = known.active = time.monotonic()
        return known

    def _drop_late(self) -> None:
        """Drop the holds of groups that have done nothing for as long as a transfer may take."""
        limit = time.monotonic() - self._timeout.total_seconds()
        for name, group in self._groups.items():
            if group.snapshot is not None and not group.reads and group.active < limit:
                group.snapshot = None
                LOGGER.warning("%s: group %s of receivers was late for version %d", self._channel, name, group.sequence)

    # ------------------------------------------------------------------ the end

    def wait(self, team: Team, last: Version | None, *, closing: bool) -> Version | None:
        """Wait until all groups have the last version; it, with the bytes that were sent. Collective.

        Only the first rank waits. If it is `closing`, it does not wait for receivers that do nothing.
        """
        if last is None:
            return None

        started = self._progress = time.monotonic()
        while not team.first(lambda: self._is_taken(started, closing)):
            pass
        sent = team.reduce(lambda: b"%d" % self._sent, lambda parts: b"%d" % sum(map(int, parts)))
        return msgspec.structs.replace(last, nbytes=int(sent))

    def _is_taken(self, started: float, closing: bool) -> bytes:
        """Whether all groups have the last version, or are not waited for any more; else empty after a moment, because
        the other ranks wait no longer for the first one than that may wait for receivers."""
        limit = self._timeout.total_seconds()
        patience = min(limit, _PATIENCE)
        until = time.monotonic() + _moment(self._timeout)
        while True:
            with self._lock:
                late = sum(group.taken < self._offer.place for group in self._groups.values())
                count = len(self._groups)
            if not late:
                return b"taken"
            now = time.monotonic()
            if now > started + limit or (closing and now > self._progress + patience):
                problem = (
                    f"{late} of {count} groups of receivers did not get the last version within "
                    f"{min(limit, now - started):.3g} s: they died, or do not call poll"
                )
                if not closing:
                    raise CommTimeout(problem)
                LOGGER.warning("%s is closed, but %s", self._channel, problem)
                return b"not waited for"
            if now > until:
                return b""
            time.sleep(_LOOK)

    def close(self) -> None:
        """Withdraw the version, and close the connections."""
        self.settle()
        if self._board is not None:
            with suppress(CommError):  # the process that keeps the board may have ended
                if self._is_listed():
                    self._board.put("name", b"")
            self._board.close()
            self._board = None
        if self._server is not None:
            self._server.close()


class _Session:
    """A connection of a receiver's rank. The group that joins by it leaves when it ends."""

    def __init__(self, sender: ChannelSender) -> None:
        self._sender = sender
        self._joined: list[str] = []

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        try:
            match operation, arguments:
                case "join", (str(group),):
                    self._sender.join(group)
                    self._joined.append(group)
                    return None
                case "latest", ():
                    return self._sender.latest()
                case "hold", (str(group), int() | None as sequence):
                    return self._sender.hold(group, sequence)
                case "read", (str(group), int(sequence), list(asked)):
                    return self._sender.read(group, sequence, msgspec.convert(asked, list[AskedBox]))
                case "release", (str(group), bool(taken)):
                    return self._sender.release(group, taken)
            raise PublishError(f"there is no operation {operation}")
        except (PublishError, msgspec.MsgspecError) as error:
            LOGGER.warning("%s: a request of a receiver was refused: %s", self._sender._channel, error)
            raise

    def close(self) -> None:
        for group in self._joined:
            self._sender.leave(group)


# ------------------------------------------------------------------ receiving


_AT_ONCE: Final = 4  # of the publisher's ranks from which a rank receives


class ChannelSource:
    """Receives the newest version through a channel, on one rank."""

    def __init__(self, channel: Channel, match: Match, timeout: timedelta) -> None:
        self._channel = channel
        self._match = match
        self._timeout = timeout
        self._board: Board | None = None
        self._publisher = ""  # at which this group has joined
        self._group = ""
        self._clients: list[Client] = []  # of the publisher's ranks
        self._messages: list[Message] = []
        self._held: Version | None = None
        self.host_copy: HostCopy | None = None
        self.bytes_read = 0

    @property
    def doing(self) -> str:
        return f"receiving at {self._channel}"

    def fetch(self, team: Team) -> Version | None:
        """Receive the publisher's version into the host copy, on all ranks together; None if there is none."""
        publisher = team.first(self._name_of_publisher).decode()
        if not publisher:
            return self._held
        try:
            if publisher != self._publisher:
                self._join(team, publisher)
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not (found := team.first(lambda: self._hold_new(deadline))):
                pass
            version = msgspec.msgpack.decode(found, type=Version | None)
            if version is None:
                return self._held
            self._held = None
            team.together(lambda: self._receive(version.place))
            if not team.first(self._tell_taken):
                self._leave()
        except BaseException:
            self._leave()
            raise
        self._held = version
        return version

    def _name_of_publisher(self) -> bytes:
        """On the first rank: the name of the publisher at the address; empty if there is none."""
        if self._board is None:
            if not self._channel.answers():
                return b""
            self._board = self._channel.connect(self._timeout)
            return self._board.value("name")
        try:
            return self._board.value("name")
        except CommError:  # the process that kept the board has ended
            self._board = None
            return b""

    def _join(self, team: Team, publisher: str) -> None:
        """Plan the messages for the boxes that this rank needs, and join as a group at all ranks of the publisher."""
        self._leave()
        self._held = None

        board = self._board
        data = team.first(lambda: b"" if board is None else board.value("listing"))

        def plan() -> None:
            try:
                listing = msgspec.msgpack.decode(data, type=PublisherListing)
                infos = listing.tensors()
            except (msgspec.MsgspecError, ValueError, KeyError) as error:
                raise CommError(f"what is listed at {self._channel} is not a publisher's: {error}") from error
            self.host_copy = self._match(infos, listing.aliases)
            wanted = [slot.needed for slot in self.host_copy.slots]
            dtypes = {name: info.dtype for name, info in infos.items()}
            most = self._channel.bucket_bytes // max(_AT_ONCE, len(team.ranks))
            self._messages = plan_messages(listing.held, wanted, dtypes, most)
            self._clients = [self._channel.client(self._timeout, where) for where in listing.servers]

        def join(_: list[bytes]) -> bytes:
            group = uuid.uuid4().hex
            self._at_all("join", group)
            return group.encode()

        self._group = team.reduce(plan, join).decode()
        self._publisher = publisher

    def _at_all(self, operation: str, *arguments: Any) -> None:
        for client in reversed(self._clients):  # the publisher's first rank, which waits, when the others know
            called(self._channel, client, operation, *arguments)

    def _hold_new(self, deadline: float) -> bytes:
        """On the first rank: hold the last version at all ranks of the publisher; None if it is not a new one, and
        empty if that could not be yet, after a moment: the other ranks wait no longer for this one."""
        first, *others = self._clients
        until = time.monotonic() + _moment(self._timeout)
        while True:
            last = msgspec.convert(called(self._channel, first, "latest"), Version)
            if last.place == (0 if self._held is None else self._held.place):
                return msgspec.msgpack.encode(None)
            if called(self._channel, first, "hold", self._group, last.place) is not None:
                if all(called(self._channel, each, "hold", self._group, last.place) is not None for each in others):
                    return msgspec.msgpack.encode(last)
                self._at_all("release", self._group, False)
            now = time.monotonic()
            if now > deadline:
                raise CommTimeout(
                    f"the publisher at {self._channel} did not let this group have a version within "
                    f"{self._timeout.total_seconds():g} s: other groups are late with earlier ones, or it publishes "
                    "all the time"
                )
            if now > until:
                return b""
            time.sleep(_LOOK)  # it publishes the next one now

    def _tell_taken(self) -> bytes:
        """On the first rank: tell the publisher that this group has all of the version. Empty if that failed: the
        publisher may have ended meanwhile, as it waits for nothing else."""
        with suppress(CommError):
            self._at_all("release", self._group, True)
            return b"told"
        return b""

    def _receive(self, sequence: int) -> None:
        by_sender = groupby(self._messages, lambda message: message.sender)
        reads = [partial(self._receive_from, [*messages], sequence) for _, messages in by_sender]
        results_of(reads, _AT_ONCE, "terrazzo-receive")
        self.bytes_read += sum(message.nbytes for message in self._messages)

    def _receive_from(self, messages: Sequence[Message], sequence: int) -> None:
        """Receive messages of one rank, and copy their boxes into the slots."""
        for message in messages:
            self.receive(message, sequence)

    @torch.no_grad()
    def receive(self, message: Message, sequence: int) -> None:
        """Receive one message, and copy its boxes into the slots."""
        assert self.host_copy is not None
        data = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
        arguments = self._group, sequence, message.asked
        called(self._channel, self._clients[message.sender], "read", *arguments, into=bytes_of(data))
        for asked, target, view in zip(message.asked, message.targets, message.views(data), strict=True):
            slot = self.host_copy.slots[target]
            as_bytes(slot.data[asked.box.relative_to(slot.box).slices()]).copy_(as_bytes(view))
            slot.is_dirty = True

    def _leave(self) -> None:
        """Close the connections to the publisher, which forgets the group. To receive again, it joins anew."""
        for client in self._clients:
            client.close()
        self._clients, self._publisher = [], ""

    def close(self) -> None:
        """Leave, and close the connection to the board."""
        self._leave()
        if self._board is not None:
            self._board.close()
            self._board = None
