"""Publish directly: the publisher sends its last snapshot to the receivers that ask for it.

The training loop does not wait for receivers: a thread on each rank sends. The first rank looks which group of
receivers asks, and tells the other ranks. The transfer to each group has a thread of its own on each rank, so that no
group waits for another one. It may go on while the next version is published: it keeps its snapshot, and the next one
gets other memory. If a transfer fails, because receivers died for instance, their group is removed; to receive again
they register as a new group.

What receivers write may be wrong. It is checked, and a group whose requests are wrong is removed, too; the publisher
goes on.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

import msgspec

from terrazzo.checkpoint.native.dtypes import can_convert, dtype_from_name, dtype_name
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.errors import CommError, CommTimeout, PublishError, TerrazzoError
from terrazzo.layout import Box
from terrazzo.publish.channel import Channel, TimedStore
from terrazzo.publish.exchange import Connections, Header
from terrazzo.publish.parts import TensorInfo
from terrazzo.publish.snapshot import Snapshot
from terrazzo.publish.transfer import IN_FLIGHT, Held, Message, Wanted, plan_messages
from terrazzo.publish.versions import Version
from terrazzo.publish.working import raising_step_errors

LOGGER: Final = logging.getLogger("terrazzo.publish")

_LOOK: Final = 0.01  # seconds between two looks at which receivers ask
_BEAT: Final = 1.0  # seconds after which the other ranks get a message also if none asks
_PATIENCE: Final = 10.0  # seconds for which `close` waits for receivers that do nothing
_REQUESTS: Final = 100  # requests that are read at one look
_VERSIONS: Final = 3  # that are on their way at once, each in memory of its own


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

    def tensors(self) -> dict[str, TensorInfo]:
        """The published tensors."""
        return {name: TensorInfo(dtype_from_name(dtype), shape) for name, (dtype, shape) in self.infos.items()}


class Request(msgspec.Struct, array_like=True, frozen=True):
    """What a group of receivers asks of a publisher: to be registered with the boxes that each of its ranks needs; for
    the present version; or to be forgotten. `group` is a name of its own."""

    group: str
    what: Literal["register", "ask", "leave"]
    wanted: list[list[Wanted]] = []


class _State(msgspec.Struct, array_like=True, frozen=True):
    """A transfer on a rank, which it tells the first one."""

    running: bool
    failed: bool
    sent: int


class _Step(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks do next, as the first one has decided."""

    stop: bool = False
    ended: dict[str, int] = {}  # groups whose transfer has ended, with its bytes, by all ranks
    serve: str = ""  # a group
    wanted: list[list[Wanted]] = []
    forget: list[str] = []  # groups


class _Receivers:
    """A group of receivers, on one rank of the publisher."""

    def __init__(self, connections: Connections, messages: tuple[Message, ...], count: int) -> None:
        self.connections = connections
        self.messages = messages  # that this rank sends
        self.count = count  # of the receivers' ranks


@dataclass(slots=True)
class _Transfer:
    """A version on its way to a group, on one rank."""

    header: Header
    snapshot: Snapshot
    running: bool = True
    failed: bool = False


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
        self._groups: dict[str, _Receivers] = {}
        self._transfers: dict[str, _Transfer] = {}  # at most one to a group
        self._sequence = 0
        self._stop = threading.Event()
        self._last: Version | None = None
        # On the first rank only: the groups that are registered.
        self._wanted: dict[str, list[list[Wanted]]] = {}
        self._asking: list[str] = []
        self._taken: dict[str, int] = {}  # the number in sequence of the version that each has
        self._left: list[str] = []  # to be forgotten by all ranks
        self._progress = time.monotonic()  # when receivers did something
        self._seen = 0  # bytes of the transfers, as far as they were known then

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

    def reads(self, snapshot: Snapshot) -> bool:
        """Whether a transfer still reads this snapshot, which must not change then."""
        return any(each.running and each.snapshot is snapshot for each in self._transfers.values())

    def send(self, team: Team, number: int, new: Snapshot, old: Snapshot | None) -> Version:
        """Send a snapshot to all receivers that ask, until `settle`; returns the version with the bytes sent."""
        with raising_step_errors():
            self._last = Version(number, self._sequence, self._name, None, 0, new.nbytes)
            while True:
                step = msgspec.msgpack.decode(team.reduce(self._state, self._decide), type=_Step)
                for group, sent in step.ended.items():
                    if self._transfers.pop(group).header.sequence == self._sequence:
                        self._last = msgspec.structs.replace(self._last, nbytes=self._last.nbytes + sent)
                for group in step.forget:
                    self._forget(group)
                if step.serve:
                    self._begin(team, step, Header(self._sequence, number), new)
                if step.stop:
                    return self._last

    def _state(self) -> bytes:
        return msgspec.msgpack.encode({group: self._state_of(group) for group in self._transfers})

    def _state_of(self, group: str) -> _State:
        transfer = self._transfers[group]
        running = transfer.running  # first: what follows is complete if it is not running any more
        known = self._groups.get(group)
        return _State(running, transfer.failed, 0 if known is None else known.connections.sent)

    def _decide(self, states: list[bytes]) -> bytes:
        """On the first rank: the next step. Waits for a request, if there is nothing to do."""
        said = [msgspec.msgpack.decode(state, type=dict[str, _State]) for state in states]
        sent = {group: sum(state[group].sent for state in said) for group in self._transfers}
        if (total := sum(sent.values())) != self._seen:
            self._seen, self._progress = total, time.monotonic()
        ended = {group: sent[group] for group in sent if not any(state[group].running for state in said)}
        for group in ended:
            self._seen -= ended[group]
            if any(state[group].failed for state in said):
                self._remove(group)
            elif group in self._taken:
                self._taken[group] = self._transfers[group].header.sequence
        serve = "" if ended or self._stopping() else self._next()
        forget, self._left = self._left, []
        return msgspec.msgpack.encode(_Step(self._stopping(), ended, serve, self._wanted.get(serve, []), forget))

    def _stopping(self) -> bool:
        return self._stop.is_set() or not threading.main_thread().is_alive()

    def _next(self) -> str:
        """A group that asks and can be served; empty if there is none for a while, or for a moment during transfers."""
        patience = _LOOK if self._transfers else min(_BEAT, self._timeout.total_seconds() / 4)
        deadline = time.monotonic() + patience
        while True:
            self._read_requests()
            under_way = {each.header.sequence for each in self._transfers.values()}
            if len(under_way | {self._sequence}) <= _VERSIONS:
                for group in self._asking:
                    if group not in self._transfers:
                        self._asking.remove(group)
                        return group
            if self._stopping() or self._left or time.monotonic() > deadline:
                return ""
            time.sleep(_LOOK)

    def _read_requests(self) -> None:
        for _ in range(_REQUESTS):
            data = self.board.pop(f"{self._name}/requests")
            if data is None:
                return
            try:
                self._take(msgspec.msgpack.decode(data, type=Request))
            except (msgspec.MsgspecError, PublishError) as error:
                LOGGER.warning("%s: a request of a receiver was ignored: %s", self._channel, error)

    def _take(self, request: Request) -> None:
        group = request.group
        self._progress = time.monotonic()
        if request.what == "register":
            if group in self._taken or not group:
                raise PublishError(f"group {group!r} of receivers cannot be registered: the name is taken, or empty")
            check_wanted(request.wanted, self._parts.tensors())
            self._wanted[group] = request.wanted
            self._taken[group] = 0
        elif request.what == "leave":
            self._remove(group)
        elif group in self._taken and group not in self._asking:
            self._asking.append(group)

    def _remove(self, group: str) -> None:
        if self._taken.pop(group, None) is not None:
            del self._wanted[group]
            self._asking = [other for other in self._asking if other != group]
            self._left.append(group)

    def _forget(self, group: str) -> None:
        known = self._groups.pop(group, None)
        if known is not None:
            known.connections.close()

    def _begin(self, team: Team, step: _Step, header: Header, snapshot: Snapshot) -> None:
        """Begin the transfer of a snapshot to a group of receivers, on a thread."""
        transfer = self._transfers[step.serve] = _Transfer(header, snapshot)
        self._progress = time.monotonic()

        def run() -> None:
            try:
                receivers = self._groups.get(step.serve) or self._connected(team, step)
                first = range(receivers.count) if team.is_coordinator else ()
                receivers.connections.send(receivers.messages, header, first, snapshot)
            except Exception as error:  # whatever a receiver does: the trainer goes on
                transfer.failed = True
                LOGGER.warning(
                    "%s: group %s of receivers did not get version %d: %s",
                    self._channel,
                    step.serve,
                    header.number,
                    error,
                )
            finally:
                transfer.running = False

        # A daemon: a process that ends does not wait for a receiver that is stopped.
        threading.Thread(target=run, name="terrazzo-send", daemon=True).start()

    def _connected(self, team: Team, step: _Step) -> _Receivers:
        dtypes = {name: dtype_from_name(dtype) for name, (dtype, _) in self._parts.infos.items()}
        size = self._channel.bucket_bytes // IN_FLIGHT
        mine = plan_messages(self._parts.held, step.wanted, dtypes, size, sender=team.rank)
        meeting = self._channel.connect(self._timeout)  # again: to wait there for receivers blocks a connection
        try:
            connections = Connections(
                meeting.store,
                f"{self._name}/{step.serve}",
                team.rank,
                len(team.ranks),
                len(step.wanted),
                self._timeout,
                self._channel.own_address,
            )
        finally:
            meeting.close()
        found = self._groups[step.serve] = _Receivers(connections, mine, len(step.wanted))
        return found

    def settle(self) -> None:
        """Stop sending. A transfer that has begun goes on."""
        self._stop.set()

    def wait_until_taken(self, has_ended: Callable[[], bool], *, closing: bool) -> None:
        """Wait until all registered receivers have the last version, or `has_ended`. Only the first rank waits: only it
        knows the receivers. If it is `closing`, it does not wait for receivers that do nothing."""
        limit = self._timeout.total_seconds()
        patience = min(limit, _PATIENCE)
        started = self._progress = time.monotonic()
        while not has_ended() and (late := self._late()):
            now = time.monotonic()
            if now > started + limit or (closing and now > self._progress + patience):
                problem = (
                    f"{late} of {len(self._taken)} groups of receivers did not get the last version within "
                    f"{min(limit, now - started):.3g} s: they died, or do not call poll"
                )
                if not closing:
                    raise CommTimeout(problem)
                LOGGER.warning("%s is closed, but %s", self._channel, problem)
                return
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


def check_wanted(wanted: Sequence[Sequence[Wanted]], infos: Mapping[str, TensorInfo]) -> None:
    """Raise if receivers want something that is not published."""
    if not wanted:
        raise PublishError("a group of receivers has no ranks")
    for rank, boxes in enumerate(wanted):
        for each in boxes:
            info = infos.get(each.name)
            if info is None:
                raise PublishError(f"rank {rank} of the receivers wants {each.name!r}, which is not published")
            try:
                box, dtype = Box(each.offsets, each.lengths), dtype_from_name(each.dtype)
                fits = Box.whole(info.shape).contains(box) and not box.is_empty and can_convert(info.dtype, dtype)
            except (ValueError, TypeError, KeyError, TerrazzoError) as error:
                raise PublishError(f"rank {rank} of the receivers wants {each.name!r} as {each}: {error}") from error
            if not fits:
                raise PublishError(
                    f"rank {rank} of the receivers wants {each.name!r} as {each}, which does not fit the published "
                    f"{info.dtype} tensor of shape {list(info.shape)}"
                )
