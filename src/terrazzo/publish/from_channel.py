"""Receive weights directly from a publisher: each rank gets the boxes that it needs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import msgspec

from terrazzo.checkpoint.native.dtypes import dtype_name
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.errors import CommError
from terrazzo.publish.channel import Channel, TimedStore
from terrazzo.publish.exchange import Connections, Header
from terrazzo.publish.host_copy import HostCopy
from terrazzo.publish.parts import TensorInfo
from terrazzo.publish.to_channel import Offer, PublisherParts, Request
from terrazzo.publish.transfer import IN_FLIGHT, Message, Wanted, plan_messages
from terrazzo.publish.versions import Version
from terrazzo.publish.working import raising_step_errors

Match = Callable[[Mapping[str, TensorInfo], Mapping[str, str]], HostCopy]
Decoded = TypeVar("Decoded", Offer, PublisherParts)


class ChannelSource:
    """Receives the newest version through a channel, on one rank."""

    def __init__(self, channel: Channel, match: Match, timeout: timedelta) -> None:
        self._channel = channel
        self._match = match
        self._timeout = timeout
        self._board: TimedStore | None = None
        self._publisher = ""  # at which this group is registered
        self._group = ""
        self._messages: tuple[Message, ...] = ()
        self._sizes = (0, 0)  # ranks of the publisher, of this side
        self._connections: Connections | None = None
        self._held: Version | None = None
        self.host_copy: HostCopy | None = None
        self.bytes_read = 0

    @property
    def doing(self) -> str:
        return f"receiving at {self._channel}"

    def fetch(self, team: Team) -> Version | None:
        """Receive the publisher's version into the host copy, on all ranks together; None if there is none."""
        with raising_step_errors():
            found = team.reduce(lambda: b"", lambda _: self._current_offer())
            if not found:
                return self._held
            offer = self._decoded(found, Offer)
            if offer.publisher != self._publisher:
                self._register(team, offer.publisher)
            held = self._held
            if held is not None and (held.id, held.place) == (offer.publisher, offer.sequence):
                return held
            self._held = None
            try:
                team.reduce(lambda: b"", lambda _: self._ask())
                answers: list[Header] = []
                team.together(lambda: answers.append(self._receive(team)))
            except BaseException:
                self._leave()
                raise
            assert self.host_copy is not None
            self._held = Version(
                answers[0].number,
                answers[0].sequence,
                offer.publisher,
                None,
                self.host_copy.nbytes,
                self.host_copy.nbytes,
            )
        return self._held

    def _current_offer(self) -> bytes:
        """On the first rank: the encoded `Offer` of the publisher; empty if there is none."""
        if self._board is None:
            if not self._channel.answers():
                return b""
            self._board = self._channel.connect(self._timeout)
        try:
            return self._board.value("current") or b""
        except CommError:  # the process that hosted the store has ended
            self._board = None
            return b""

    def _register(self, team: Team, publisher: str) -> None:
        """Send the publisher the boxes that this group needs, and plan the messages that will come."""
        self._leave()

        def tell(_: list[bytes]) -> bytes:
            assert self._board is not None
            data = self._board.value(f"{publisher}/parts")
            if data is None:
                raise CommError(f"the publisher at {self._channel} has not listed its tensors yet: call poll again")
            return data

        parts = self._decoded(team.reduce(lambda: b"", tell), PublisherParts)
        infos = parts.tensors()
        own: list[Wanted] = []

        def want() -> bytes:
            if self._board is None or not team.is_coordinator:  # another process may host the store now
                self._board = self._channel.connect(self._timeout)
            self.host_copy = self._match(infos, parts.aliases)
            own.extend(
                Wanted(slot.source, slot.box.offsets, slot.box.lengths, dtype_name(slot.data.dtype))
                for slot in self.host_copy.slots
            )
            return msgspec.msgpack.encode(own)

        def register(said: list[bytes]) -> bytes:
            assert self._board is not None
            group = uuid.uuid4().hex
            wanted = [msgspec.msgpack.decode(each, type=list[Wanted]) for each in said]
            self._send(publisher, Request(group, "register", wanted))
            return group.encode()

        self._held = None
        self._group = team.reduce(want, register).decode()
        self._publisher = publisher
        dtypes = {name: info.dtype for name, info in infos.items()}
        nobody: list[list[Wanted]] = [[] for _ in team.ranks]
        nobody[team.rank] = own
        size = self._channel.bucket_bytes // IN_FLIGHT
        self._sizes = len(parts.held), len(team.ranks)

        def plan() -> None:
            self._messages = plan_messages(parts.held, nobody, dtypes, size, receiver=team.rank)

        try:
            team.together(plan)
        except BaseException:
            self._leave()
            raise

    def _ask(self) -> bytes:
        self._send(self._publisher, Request(self._group, "ask"))
        return b""

    def _send(self, publisher: str, request: Request) -> None:
        assert self._board is not None
        self._board.push(f"{publisher}/requests", msgspec.msgpack.encode(request))

    def _decoded(self, data: bytes, kind: type[Decoded]) -> Decoded:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise CommError(f"what stands in the store at {self._channel} is not a publisher's: {error}") from error

    def _receive(self, team: Team) -> Header:
        senders, receivers = self._sizes
        if self._connections is None:
            assert self._board is not None
            name = f"{self._publisher}/{self._group}"
            self._connections = Connections(
                self._board.store,
                name,
                senders + team.rank,
                senders,
                receivers,
                self._timeout,
                self._channel.own_address,
            )
        header = self._connections.receive_header()
        assert self.host_copy is not None
        self.bytes_read += self._connections.receive(self._messages, self.host_copy.slots)
        return header

    def _leave(self) -> None:
        """Unregister from the publisher. To receive again, the group registers with a new number."""
        if self._connections is not None:
            self._connections.close()
            self._connections = None
        if self._board is not None and self._publisher:
            with suppress(CommError):  # the process that hosts the store may have ended
                self._send(self._publisher, Request(self._group, "leave"))
        self._publisher = ""

    def close(self) -> None:
        """Unregister, and close the connections."""
        self._leave()
        if self._board is not None:
            self._board.close()
            self._board = None
