"""Receive weights directly from a publisher: each rank gets the boxes that it needs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import msgspec
import torch

from terrazzo._threads import results_of
from terrazzo.checkpoint.native.dtypes import as_bytes
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.comm.serving import Client
from terrazzo.errors import CommError, CommTimeout
from terrazzo.publish.channel import Board, Channel, Message, called, plan_messages
from terrazzo.publish.host_copy import HostCopy
from terrazzo.publish.parts import TensorInfo
from terrazzo.publish.to_channel import Offer, PublisherListing
from terrazzo.publish.versions import Version

Match = Callable[[Mapping[str, TensorInfo], Mapping[str, str]], HostCopy]

_AT_ONCE: Final = 4  # of the publisher's ranks from which a rank receives
_LOOK: Final = 0.01  # seconds between two tries to hold a version


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
            found = team.first(self._hold_new)
            if not found:
                return self._held
            offer = msgspec.msgpack.decode(found, type=Offer)
            self._held = None
            team.together(partial(self._receive, offer))
            team.first(lambda: self._at_all("release", self._group, True))
        except BaseException:
            self._leave()
            raise
        assert self.host_copy is not None
        nbytes = self.host_copy.nbytes
        self._held = Version(offer.number, offer.sequence, publisher, None, nbytes, nbytes)
        return self._held

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

        def plan() -> bytes:
            try:
                listing = msgspec.msgpack.decode(data, type=PublisherListing)
                infos = listing.tensors()
            except (msgspec.MsgspecError, ValueError, KeyError) as error:
                raise CommError(f"what is listed at {self._channel} is not a publisher's: {error}") from error
            self.host_copy = self._match(infos, listing.aliases)
            wanted = [(slot.source, slot.box, slot.data.dtype) for slot in self.host_copy.slots]
            dtypes = {name: info.dtype for name, info in infos.items()}
            most = self._channel.bucket_bytes // max(_AT_ONCE, len(team.ranks))
            self._messages = plan_messages(listing.held, wanted, dtypes, most)
            self._clients = [self._channel.client(self._timeout, where) for where in listing.servers]
            return b""

        def join(_: list[bytes]) -> bytes:
            group = uuid.uuid4().hex
            self._at_all("join", group)
            return group.encode()

        self._group = team.reduce(plan, join).decode()
        self._publisher = publisher

    def _at_all(self, operation: str, *arguments: Any) -> bytes:
        for client in self._clients:
            called(self._channel, client, operation, *arguments)
        return b""

    def _hold_new(self) -> bytes:
        """On the first rank: hold the last version at all ranks of the publisher; empty if it is not a new one."""
        first, *others = self._clients
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            last = msgspec.convert(called(self._channel, first, "latest"), Offer)
            if last.sequence == (0 if self._held is None else self._held.place):
                return b""
            if called(self._channel, first, "hold", self._group, last.sequence) is not None:
                if all(called(self._channel, each, "hold", self._group, last.sequence) is not None for each in others):
                    return msgspec.msgpack.encode(last)
                self._at_all("release", self._group, False)
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"the publisher at {self._channel} did not let this group have a version within "
                    f"{self._timeout.total_seconds():g} s: other groups are late with earlier ones, or it publishes "
                    "all the time"
                )
            time.sleep(_LOOK)  # it publishes the next one now

    def _receive(self, offer: Offer) -> None:
        by_sender: dict[int, list[Message]] = {}
        for message in self._messages:
            by_sender.setdefault(message.sender, []).append(message)
        reads = [partial(self._receive_from, each, offer.sequence) for each in by_sender.values()]
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
