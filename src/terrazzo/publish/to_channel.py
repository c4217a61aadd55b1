"""Publish directly: the publisher sends its last snapshot to the receivers that ask for it.

The training loop does not wait for receivers: a thread on each rank sends. The first rank's thread looks which group
of receivers asks, and sends its number to the other ranks. If a transfer fails, because receivers died for instance,
their group is removed; to receive again they register as a new group.
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
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.errors import CommError, CommTimeout, PublishError
from terrazzo.publish.channel import Channel, TimedStore
from terrazzo.publish.exchange import Connections, Header
from terrazzo.publish.parts import TensorInfo
from terrazzo.publish.snapshot import Snapshot
from terrazzo.publish.transfer import IN_FLIGHT, Held, Message, Wanted, plan_messages
from terrazzo.publish.versions import Version
from terrazzo.publish.working import all_true, raising_step_errors

LOGGER: Final = logging.getLogger("terrazzo.publish")

_LOOK: Final = 0.01  # seconds between two looks at which receivers ask
_BEAT: Final = 1.0  # seconds after which the other ranks get a message also if none asks
_NOTHING, _STOP = -1, -2


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The version that a publisher sends now."""

    publisher: str
    sequence: int
    number: int


class PublisherParts(msgspec.Struct, array_like=True, frozen=True):
    """The published tensors, and the boxes that each of the publisher's ranks has."""

    infos: dict[str, tuple[str, tuple[int, ...]]]
    aliases: dict[str, str]
    held: list[list[Held]]


class ReceiverParts(msgspec.Struct, array_like=True, frozen=True):
    """The boxes that each rank of a group of receivers needs."""

    publisher: str
    wanted: list[list[Wanted]]


class _Receivers:
    """A group of receivers, on one rank of the publisher."""

    def __init__(self, connections: Connections, messages: tuple[Message, ...], count: int) -> None:
        self.connections = connections
        self.messages = messages  # that this rank sends
        self.count = count  # of the receivers' ranks


class ChannelSender:
    """Publishes through a channel, on one rank."""

    snapshots = 1

    def __init__(
        self, channel: Channel, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str], timeout: timedelta
    ) -> None:
        self._channel = channel
        self._infos = infos
        self._aliases = dict(aliases)
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._board: TimedStore | None = None
        self._parts = PublisherParts({}, {}, [])
        self._groups: dict[int, _Receivers] = {}
        self._gone: set[int] = set()
        self._asked: dict[int, int] = {}
        self._taken: dict[int, int] = {}  # by group, the number in sequence of the version that it has
        self._sequence = 0
        self._stop = threading.Event()
        self._last: Version | None = None

    @property
    def board(self) -> TimedStore:
        assert self._board is not None
        return self._board

    def begin(self, team: Team, snapshot: Snapshot) -> int | None:
        """Start or find the store at the address, and write there what this publisher has. Returns None: there is no
        earlier version."""

        def host(_: list[bytes]) -> bytes:
            self._board = self._channel.serve(self._timeout)
            return self._name.encode()

        self._name = team.reduce(lambda: b"", host).decode()

        def describe() -> bytes:
            if self._board is None:
                self._board = self._channel.connect(self._timeout)
            held = [
                Held(name, box.offsets, box.lengths) for name, box in zip(snapshot.names, snapshot.boxes, strict=True)
            ]
            infos = {name: (dtype_name(info.dtype), info.shape) for name, info in self._infos.items()}
            return msgspec.msgpack.encode((infos, held))

        def tell(parts: list[bytes]) -> bytes:
            said = [
                msgspec.msgpack.decode(part, type=tuple[dict[str, tuple[str, tuple[int, ...]]], list[Held]])
                for part in parts
            ]
            infos = {name: info for found, _ in said for name, info in found.items()}
            packed = msgspec.msgpack.encode(PublisherParts(infos, self._aliases, [held for _, held in said]))
            self.board.put(f"{self._name}/parts", packed)
            self.board.put("current", b"")
            self.board.put("publisher", self._name.encode())
            return packed

        self._parts = msgspec.msgpack.decode(team.reduce(describe, tell), type=PublisherParts)
        return None

    def announce(self, number: int) -> None:
        """Allow receivers to ask for the snapshot. Called on the first rank, when all ranks have taken it."""
        if (self.board.value("publisher") or b"").decode() != self._name:
            raise CommError(
                f"another publisher has begun to publish at {self._channel}, so this one cannot go on: close it, or "
                "give each publisher an address of its own"
            )
        self.board.put("current", msgspec.msgpack.encode(Offer(self._name, self._sequence + 1, number)))

    def starting(self) -> None:
        """Called between `announce` and `send`."""
        self._sequence += 1
        self._stop.clear()

    def send(self, team: Team, number: int, new: Snapshot, old: Snapshot | None) -> Version:
        """Send a snapshot to all receivers that ask, until `settle`; returns the version with the bytes sent."""
        sent = 0
        with raising_step_errors():
            self._last = Version(number, self._sequence, self._name, None, 0, new.nbytes)
            while True:
                group = int(team.reduce(lambda: b"", lambda _: b"%d" % self._next()))
                if group == _STOP:
                    return self._last
                if group != _NOTHING:
                    sent += self._serve(team, group, number, new)
                    self._last = msgspec.structs.replace(self._last, nbytes=sent)

    def _next(self) -> int:
        """On the first rank: the group that asks; `_NOTHING` if none asks for a while, `_STOP` at the end."""
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
        """The groups of receivers that are registered at this publisher."""
        found = []
        for group in range(1, self.board.count("receivers", 0) + 1):
            if group in self._gone:
                continue
            if group not in self._taken:
                data = self.board.value(f"receiver/{group}")
                if data is None:  # it has its number, and will register soon
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

    def _serve(self, team: Team, group: int, number: int, snapshot: Snapshot) -> int:
        """Send the snapshot to a group of receivers; returns the bytes that all ranks sent."""
        error: CommError | PublishError | None = None
        sent = 0
        try:
            receivers = self._groups.get(group) or self._connected(team, group)
            header = Header(self._sequence, number)
            first = range(receivers.count) if team.is_coordinator else ()
            sent = receivers.connections.send(receivers.messages, header, first, snapshot)
        except (CommError, PublishError) as caught:
            error = caught
        if not all_true(team, error is None):
            if error is not None:
                LOGGER.warning(
                    "%s: group %d of receivers did not get version %d: %s", self._channel, group, number, error
                )
            self._forget(group)
            return 0
        if team.is_coordinator:
            self._taken[group] = self._sequence
        total = team.reduce(lambda: b"%d" % sent, lambda parts: b"%d" % sum(map(int, parts)))
        return int(total)

    def _connected(self, team: Team, group: int) -> _Receivers:
        data = self.board.value(f"receiver/{group}")
        if data is None:
            raise CommError(f"group {group} of receivers is not registered any more")
        wanted = msgspec.msgpack.decode(data, type=ReceiverParts).wanted
        dtypes = {name: dtype_from_name(dtype) for name, (dtype, _) in self._parts.infos.items()}
        size = self._channel.bucket_bytes // IN_FLIGHT
        mine = plan_messages(self._parts.held, wanted, dtypes, size, sender=team.rank)
        connections = Connections(
            self.board.store, f"{self._name}/{group}", team.rank, len(team.ranks), len(wanted), self._timeout
        )
        found = self._groups[group] = _Receivers(connections, mine, len(wanted))
        return found

    def settle(self) -> None:
        """Stop sending, after the present transfer."""
        self._stop.set()

    def wait_until_taken(self, has_ended: Callable[[], bool]) -> None:
        """Wait until all registered receivers have the last version, or `has_ended`. Only the first rank waits: only it
        knows the receivers."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not has_ended() and (late := self._late()):
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"{late} of {len(self._taken)} groups of receivers did not get the last version within "
                    f"{self._timeout.total_seconds():g} s: they died, or do not call poll"
                )
            time.sleep(_LOOK)

    def _late(self) -> int:
        return sum(sequence < self._sequence for sequence in dict(self._taken).values())

    @property
    def last(self) -> Version | None:
        """The version that is being sent, with the bytes sent so far."""
        return self._last

    def close(self) -> None:
        """Withdraw the version, and close the connections."""
        for group in list(self._groups):
            self._forget(group)
        if self._board is not None:
            with suppress(CommError):  # the process that hosted the store may have ended
                if (self._board.value("publisher") or b"").decode() == self._name:
                    self._board.put("current", b"")
            self._board.close()
            self._board = None
