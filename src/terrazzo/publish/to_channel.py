"""Publishing directly: a publisher keeps its last snapshot at hand and sends it to whichever receivers ask.

The trainer waits for nobody.  A thread on each rank serves; the first rank looks who asks, and tells the others.  Of
receivers that die in the middle no more is known than that their transfer failed: they are forgotten, and come again as
others.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final

import msgspec

from terrazzo.checkpoint.native.dtypes import dtype_from_name, dtype_name
from terrazzo.checkpoint.run.coordination import Place
from terrazzo.errors import CommError, CommTimeout, PublishError
from terrazzo.publish.channel import Board, Channel
from terrazzo.publish.exchange import Connections, Header
from terrazzo.publish.parts import About
from terrazzo.publish.snapshot import Snapshot
from terrazzo.publish.transfer import IN_FLIGHT, Held, Message, Wanted, plan_messages
from terrazzo.publish.versions import Version
from terrazzo.publish.working import all_say, told

LOGGER: Final = logging.getLogger("terrazzo.publish")

_LOOK: Final = 0.01  # seconds between looks for who asks
_BEAT: Final = 1.0  # seconds after which the other ranks hear that there is nothing
_NOTHING, _STOP = -1, -2


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The version that a publisher has to give."""

    publisher: str
    sequence: int
    number: int


class PublisherParts(msgspec.Struct, array_like=True, frozen=True):
    """What there is, and which rank has what."""

    abouts: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    held: list[list[Held]]


class ReceiverParts(msgspec.Struct, array_like=True, frozen=True):
    """What the ranks of a group of receivers want."""

    publisher: str
    wanted: list[list[Wanted]]


class _Receivers:
    """A group of receivers, seen from one rank of the publisher."""

    def __init__(self, connections: Connections, messages: tuple[Message, ...], count: int) -> None:
        self.connections = connections
        self.messages = messages  # of this sender
        self.count = count  # ranks


class ChannelSender:
    """One rank's side of publishing through a channel."""

    snapshots = 1

    def __init__(
        self, channel: Channel, abouts: Mapping[str, About], aliases: Mapping[str, str], timeout: timedelta
    ) -> None:
        self._channel = channel
        self._abouts = abouts
        self._aliases = dict(aliases)
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._board: Board | None = None
        self._parts = PublisherParts({}, {}, [])
        self._groups: dict[int, _Receivers] = {}
        self._gone: set[int] = set()
        self._asked: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # by group, the sequence that it has
        self._sequence = 0
        self._stop = threading.Event()
        self._last: Version | None = None

    @property
    def board(self) -> Board:
        assert self._board is not None
        return self._board

    def begin(self, place: Place, snapshot: Snapshot) -> int | None:
        """Answer at the address, and say what there is.  There is no version before the first."""

        def host(_: list[bytes]) -> bytes:
            self._board = self._channel.serve(self._timeout)
            return self._name.encode()

        self._name = place.reduce(lambda: b"", host).decode()

        def describe() -> bytes:
            if self._board is None:
                self._board = self._channel.connect(self._timeout)
            held = [
                Held(name, box.offsets, box.lengths) for name, box in zip(snapshot.names, snapshot.boxes, strict=True)
            ]
            abouts = {name: (dtype_name(about.dtype), about.shape) for name, about in self._abouts.items()}
            return msgspec.msgpack.encode((abouts, held))

        def tell(parts: list[bytes]) -> bytes:
            said = [
                msgspec.msgpack.decode(part, type=tuple[dict[str, tuple[str, tuple[int, ...]]], list[Held]])
                for part in parts
            ]
            abouts = {name: about for found, _ in said for name, about in found.items()}
            packed = msgspec.msgpack.encode(PublisherParts(abouts, self._aliases, [held for _, held in said]))
            self.board.put(f"{self._name}/parts", packed)
            self.board.put("current", b"")
            self.board.put("publisher", self._name.encode())
            return packed

        self._parts = msgspec.msgpack.decode(place.reduce(describe, tell), type=PublisherParts)
        return None

    def announce(self, number: int) -> None:
        """On the first rank, when all have their snapshot: receivers may ask for it."""
        if (self.board.value("publisher") or b"").decode() != self._name:
            raise CommError(f"another publisher has begun to publish at {self._channel}: this one has to end")
        self.board.put("current", msgspec.msgpack.encode(Offer(self._name, self._sequence + 1, number)))

    def starting(self) -> None:
        """A version has been announced, and `send` follows."""
        self._sequence += 1
        self._stop.clear()

    def send(self, place: Place, number: int, new: Snapshot, old: Snapshot | None) -> Version:
        """Serve a snapshot until `settle`; returns what has been sent in all."""
        sent = 0
        with told():
            self._last = Version(number, self._sequence, self._name, None, 0, new.nbytes)
            while True:
                group = int(place.reduce(lambda: b"", lambda _: b"%d" % self._next()))
                if group == _STOP:
                    return self._last
                if group != _NOTHING:
                    sent += self._serve(place, group, number, new)
                    self._last = msgspec.structs.replace(self._last, nbytes=sent)

    def _next(self) -> int:
        """On the first rank: who asks; after a while, nobody."""
        deadline = time.monotonic() + min(_BEAT, self._timeout.total_seconds() / 4)
        while time.monotonic() < deadline:
            if self._stop.is_set() or not threading.main_thread().is_alive():
                return _STOP
            for group in self._present():
                if self.board.has(f"ask/{group}/{self._asked.get(group, 0)}"):
                    self._asked[group] = self._asked.get(group, 0) + 1
                    return group
            time.sleep(_LOOK)
        return _NOTHING

    def _present(self) -> list[int]:
        """The groups of receivers that may ask this publisher."""
        found = []
        for group in range(1, self.board.count("receivers", 0) + 1):
            if group in self._gone:
                continue
            if group not in self._taken:
                data = self.board.value(f"receiver/{group}")
                if data is None:  # it is about to say
                    continue
                if msgspec.msgpack.decode(data, type=ReceiverParts).publisher != self._name:
                    self._gone.add(group)
                    continue
                self._taken[group] = 0
            if self.board.has(f"gone/{self._name}/{group}"):
                self._forget(group)
                continue
            found.append(group)
        return found

    def _forget(self, group: int) -> None:
        self._gone.add(group)
        self._taken.pop(group, None)
        known = self._groups.pop(group, None)
        if known is not None:
            known.connections.close()

    def _serve(self, place: Place, group: int, number: int, snapshot: Snapshot) -> int:
        """Send the snapshot to a group of receivers; returns the bytes of all ranks."""
        error: CommError | PublishError | None = None
        sent = 0
        try:
            receivers = self._groups.get(group) or self._connected(place, group)
            header = Header(self._sequence, number)
            first = range(receivers.count) if place.is_coordinator else ()
            sent = receivers.connections.send(receivers.messages, header, first, snapshot)
        except (CommError, PublishError) as caught:
            error = caught
        if not all_say(place, error is None):
            if error is not None:
                LOGGER.warning("%s: receivers %d did not get version %d: %s", self._channel, group, number, error)
            self._forget(group)
            return 0
        if place.is_coordinator:
            self._taken[group] = self._sequence
        total = place.reduce(lambda: b"%d" % sent, lambda parts: b"%d" % sum(map(int, parts)))
        return int(total)

    def _connected(self, place: Place, group: int) -> _Receivers:
        data = self.board.value(f"receiver/{group}")
        if data is None:
            raise CommError(f"receivers {group} have not said what they want")
        wanted = msgspec.msgpack.decode(data, type=ReceiverParts).wanted
        dtypes = {name: dtype_from_name(dtype) for name, (dtype, _) in self._parts.abouts.items()}
        size = self._channel.bucket_bytes // IN_FLIGHT
        mine = plan_messages(self._parts.held, wanted, dtypes, size, sender=place.rank)
        connections = Connections(
            self.board.store, f"{self._name}/{group}", place.rank, len(place.ranks), len(wanted), self._timeout
        )
        found = self._groups[group] = _Receivers(connections, mine, len(wanted))
        return found

    def settle(self) -> None:
        """Stop serving, after the transfer that is under way."""
        self._stop.set()

    def wait_until_taken(self, has_ended: Callable[[], bool]) -> None:
        """Until all receivers that are there have the last version, or serving has ended; on other ranks than the
        first, which alone knows, not at all."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not has_ended() and (late := self._late()):
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"{late} of {len(self._taken)} groups of receivers have not taken the last version within "
                    f"{self._timeout.total_seconds():g} s: they have died, or do not call poll"
                )
            time.sleep(_LOOK)

    def _late(self) -> int:
        return sum(sequence < self._sequence for sequence in dict(self._taken).values())

    @property
    def last(self) -> Version | None:
        """What is being served, and how many bytes of it have been sent."""
        return self._last

    def close(self) -> None:
        """Nothing more is to be had here."""
        for group in list(self._groups):
            self._forget(group)
        if self._board is not None:
            with suppress(CommError):  # whoever hosted the store has ended before
                if (self._board.value("publisher") or b"").decode() == self._name:
                    self._board.put("current", b"")
            self._board.close()
            self._board = None
