"""`Transfer`: from ranks that train to ranks that serve, all in one process group, through its collectives.

Both sides list their boxes once. From that follows which of its boxes each rank sends to which other one, in messages
of bounded size (`channel.plan_messages`): every element that a rank needs comes once, from one of those that have it.
In a round each rank sends at most one message to each other one, as an uneven all-to-all. Messages are on the device,
from the tensors of one model to those of the other: there is no snapshot and no second copy, so both sides wait for the
transfer, and a receiver's model is written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from terrazzo._torch.groups import group_of_jobs
from terrazzo.checkpoint.native.tensors import as_bytes, dtype_from_name, dtype_name
from terrazzo.checkpoint.run.coordination import Team, find_team
from terrazzo.comm import Axis, collectives
from terrazzo.comm.alone import backends
from terrazzo.comm.pending import timed_out
from terrazzo.errors import CommError, CommTimeout, PublishError, PublishValueError
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.publish.channel import TRANSFER_LIMIT, AskedBox, Message, nbytes_of, pack, plan_messages
from terrazzo.publish.host_copy import NeededBox, aligned, sources_of, targets_of
from terrazzo.publish.parts import Parts, RenameLike, changed, described, parts_of, shares_of

_NAMED: Final = 10  # tensors, in a message
_Weights = nn.Module | Mapping[str, torch.Tensor]
_Target = tuple[NeededBox, list[torch.Tensor]]  # what this rank receives, and the model's memory for it


class _Side(msgspec.Struct, array_like=True, frozen=True):
    """What a rank tells the others: the description of what it sends and in which dtype (empty: in their own), whether
    it receives, and its devices."""

    sends: bytes
    dtype: str
    receives: bool
    devices: list[str]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What a rank sends and receives in each transfer, by the position of the other rank in the group.

    Attributes:
        rounds: The number of all-to-alls.
        sends: For each rank, the boxes that it gets in each of the first rounds.
        receives: For each rank, the messages that it sends in each of the first rounds.
    """

    rounds: int
    sends: tuple[tuple[tuple[AskedBox, ...], ...], ...]
    receives: tuple[tuple[Message, ...], ...]

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={getattr(self, name)}" for name in ("rounds", "bytes_sent", "bytes_received"))
        return f"TransferPlan({found})"

    @property
    def bytes_sent(self) -> int:
        return sum(nbytes_of(asked) for messages in self.sends for asked in messages)

    @property
    def bytes_received(self) -> int:
        return sum(message.nbytes for messages in self.receives for message in messages)


def join(address: str, rank: int, size: int, *, timeout: timedelta = TRANSFER_LIMIT) -> ProcessGroup:
    """A process group of ranks that were started as several jobs, such as a trainer and servers, for a `Transfer`.

    All of them call it together, each job with its own process group initialised. Whoever reaches the address can take
    part, as with `torch.distributed.init_process_group`. `torch.distributed.destroy_process_group(group)` ends it.

    Args:
        address: "host:port", of rank 0, which listens there.
        rank: This process's rank in the group; a job's first ones may be 0 to 3, and those of the other 4 and 5.
        size: The number of ranks of all jobs together.
        timeout: How long a rank waits for the others, here and in each communication of the group.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= rank < size:
        raise PublishValueError(f"join needs 'host:port' and a rank below {size}, not {address!r} and {rank}")
    try:
        store = dist.TCPStore(host.strip("[]"), int(port), size, rank == 0, timeout)
        return group_of_jobs(store, rank, size, backends(), f"terrazzo_transfer_{address}", timeout)
    except RuntimeError as error:
        raise (CommTimeout if timed_out(error) else CommError)(
            f"rank {rank} of {size} could not join the others at {address} within {timeout.total_seconds():g} s: "
            f"{error}. Rank 0 must run on that host with the port free, and all ranks must call join"
        ) from error


class Transfer(ShownAsCall):
    """Copies the weights of a model to a model of another layout on other ranks, or on the same ones, from device to
    device.

    All ranks of the process group construct one together: those of the trainer pass `send`, those that serve `receive`,
    and ranks that do both pass both. `run`, on all of them, copies the present values. Nothing goes through host memory
    if the models are on accelerators; each rank gets the elements of its own part once, rounded before they are sent if
    its dtype is shorter. Memory beside the models: twice `bucket_bytes` on each rank.

    Unlike a `Publisher`, `run` waits for all ranks, and it changes the receivers' model while it runs, so no forward
    pass may. If it fails, that model may have values of both versions until a `run` succeeds.

    Args:
        send: The model to copy from, or tensors by name; of any layout.
        receive: The model to copy to, or tensors by name; of any layout.
        send_rename: The published names, if they differ from those of `send`: a `Rename` of
            `terrazzo.integrations.huggingface`.
        receive_rename: The same for `receive`.
        dtype: The dtype in which ranks with `send` send floating-point tensors. None: their own, or the receiver's if
            that is shorter and `allow_lossy_dtype` is set there.
        strict: Whether every tensor of `receive` must be sent. Those that it lacks are not sent.
        allow_lossy_dtype: Round floating-point numbers if the receiver's dtype has fewer bits than the one sent.
        process_group: All these ranks; default: all of the program. `join` makes one of several jobs.
        bucket_bytes: The most memory for what a rank sends at one time, and for what it receives.
        timeout: How long a rank waits for the others to begin; default: the process group's time limit, which is also
            that of the communication.

    >>> model, served = nn.Linear(2, 1), nn.Linear(2, 1, dtype=torch.bfloat16)
    >>> transfer = Transfer(send=model, receive=served, dtype=torch.bfloat16)
    >>> transfer.run()
    >>> served.weight.equal(model.weight.bfloat16()), transfer.plan
    (True, TransferPlan(rounds=1, bytes_sent=18, bytes_received=18))
    """

    def __init__(
        self,
        *,
        send: _Weights | None = None,
        receive: _Weights | None = None,
        send_rename: RenameLike | None = None,
        receive_rename: RenameLike | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
        allow_lossy_dtype: bool = False,
        process_group: ProcessGroup | None = None,
        bucket_bytes: int = 64 << 20,
        timeout: timedelta | None = None,
    ) -> None:
        if bucket_bytes < 1 << 10:
            raise PublishValueError(f"bucket_bytes must be 1024 or more, not {bucket_bytes}")
        self._send, self._send_rename = send, send_rename
        self._receive, self._receive_rename = receive, receive_rename
        self._group, self._timeout = process_group, timeout
        self._sources: dict[str, str] = {}
        self._described: tuple[bytes, bytes] = (b"", b"")
        team = self._team()
        sides = self._sides(team, dtype)
        senders = [rank for rank, side in enumerate(sides) if side.sends]
        sent_as = sides[senders[0]].dtype
        tables = [sides[rank].sends for rank in senders]
        shares = shares_of(tables, None, dtype_from_name(sent_as) if sent_as else None)
        self._own = dict(zip(senders, shares.own, strict=True)).get(team.rank, [])
        self._axis = self._made_axis(team, sides)
        most = bucket_bytes // max(len(senders), sum(side.receives for side in sides))

        def wanted() -> list[Message]:
            if self._receive is None:
                return []
            parts = parts_of(self._receive, self._receive_rename)
            self._sources = sources_of(
                parts, shares.infos, shares.aliases, strict=strict, allow_lossy_dtype=allow_lossy_dtype
            )
            held = dict(zip(senders, shares.held, strict=True))
            boxes = [needed for needed, _ in self._targets(parts)]
            dtypes = {name: info.dtype for name, info in shares.infos.items()}
            return plan_messages([held.get(rank, []) for rank in range(len(sides))], boxes, dtypes, most)

        self._plan = _agreed_plan(team, wanted)

    @property
    def plan(self) -> TransferPlan:
        """What this rank sends and receives in each transfer."""
        return self._plan

    @torch.no_grad()
    def run(self) -> None:
        """Copy the present values of `send` to `receive`, on all ranks together.

        A rank whose model has changed its layout, or that does not come, makes it fail on all ranks before anything is
        sent.
        """
        found: list[tuple[Parts | None, Parts | None]] = []

        def look() -> None:
            found.append((self._parts(self._send, self._send_rename), self._parts(self._receive, self._receive_rename)))
            if _described(found[0]) != self._described:
                raise changed("this Transfer was constructed: construct another one")

        self._team().together(look)
        sent, received = found[0]
        own = [] if sent is None else [sent.parts[number] for number in self._own]
        targets = [] if received is None else self._targets(received)
        boxes, tensors = [part.box for part in own], [part.data for part in own]
        devices = (part.data.device for parts in found[0] if parts is not None for part in parts.parts)
        kind = torch.device(self._axis.device_type)
        device = next((device for device in devices if device.type == kind.type), kind)  # not the current one
        for number in range(self._plan.rounds):
            outgoing = [messages[number] if number < len(messages) else () for messages in self._plan.sends]
            incoming = [messages[number] if number < len(messages) else None for messages in self._plan.receives]
            sizes = [aligned(nbytes_of(asked)) for asked in outgoing]
            lengths = [0 if message is None else aligned(message.nbytes) for message in incoming]
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            for asked, piece in zip(outgoing, data.split(sizes), strict=True):
                pack(piece, asked, boxes, tensors)
            try:
                came = collectives.exchange_rows(data, self._axis, sizes, lengths)
            except CommError as error:
                names = [own[each.source].name for asked in outgoing for each in asked]
                names += [targets[target][0].source for message in incoming if message for target in message.targets]
                raise _naming(error, names) from error
            for message, piece in zip(incoming, came.split(lengths), strict=True):
                if message is not None:
                    _unpack(message, piece, targets)

    # ------------------------------------------------------------------ what all ranks have to know

    def _team(self) -> Team:
        return find_team(self._group, doing="a transfer of weights", timeout=self._timeout)

    def _parts(self, model: _Weights | None, rename: RenameLike | None) -> Parts | None:
        return None if model is None else parts_of(model, rename)

    def _sides(self, team: Team, dtype: torch.dtype | None) -> list[_Side]:
        def describe() -> bytes:
            both = self._parts(self._send, self._send_rename), self._parts(self._receive, self._receive_rename)
            self._described = _described(both)
            devices = {part.data.device.type for parts in both if parts is not None for part in parts.parts}
            name = "" if dtype is None else dtype_name(dtype)
            return msgspec.msgpack.encode(_Side(self._described[0], name, both[1] is not None, sorted(devices)))

        def check(said: list[bytes]) -> bytes:
            sides = [msgspec.msgpack.decode(each, type=_Side) for each in said]
            for what, there in (("send", [s.sends for s in sides]), ("receive", [s.receives for s in sides])):
                if not any(there):
                    raise PublishError(f"no rank of the process group has passed a model to {what}")
            dtypes = {side.dtype for side in sides if side.sends}
            if len(dtypes) > 1:
                raise PublishError(f"the ranks that send pass different dtypes: {', '.join(sorted(dtypes))}")
            devices = {device for side in sides for device in side.devices if device != "cpu"}
            if len(devices) > 1:
                raise PublishError(f"a process group cannot transfer between {' and '.join(sorted(devices))}")
            return msgspec.msgpack.encode(sides)

        return msgspec.msgpack.decode(team.reduce(describe, check), type=list[_Side])

    def _made_axis(self, team: Team, sides: Sequence[_Side]) -> Axis:
        device = next((device for side in sides for device in side.devices if device != "cpu"), "cpu")
        group = None
        if len(team.ranks) > 1:
            group = self._group if self._group is not None else dist.group.WORLD
        return Axis(group, len(team.ranks), team.rank, team.ranks, "transfer", device)

    def _targets(self, parts: Parts) -> list[_Target]:
        return [*targets_of(parts, self._sources).items()]


def _agreed_plan(team: Team, wanted: Callable[[], list[Message]]) -> TransferPlan:
    """This rank's plan: what it receives is `wanted`, and what it sends follows from what the others want of it."""
    mine: list[Message] = []

    def ask() -> bytes:
        mine.extend(wanted())
        asked: list[list[tuple[AskedBox, ...]]] = [[] for _ in team.ranks]
        for message in mine:
            asked[message.sender].append(message.asked)
        return msgspec.msgpack.encode(asked)

    def route(said: list[bytes]) -> list[bytes]:
        asked = [msgspec.msgpack.decode(each, type=list[list[msgspec.Raw]]) for each in said]
        rounds = max(len(messages) for each in asked for messages in each)
        return [msgspec.msgpack.encode((rounds, [each[sender] for each in asked])) for sender in range(len(asked))]

    answer = team.reduce_scatter(ask, route)
    rounds, sends = msgspec.msgpack.decode(answer, type=tuple[int, tuple[tuple[tuple[AskedBox, ...], ...], ...]])
    receives = tuple(tuple(each for each in mine if each.sender == rank) for rank in range(len(team.ranks)))
    return TransferPlan(rounds, sends, receives)


def _described(both: tuple[Parts | None, Parts | None]) -> tuple[bytes, bytes]:
    sent, received = (b"" if parts is None else described(parts) for parts in both)
    return sent, received


def _unpack(message: Message, data: torch.Tensor, targets: Sequence[_Target]) -> None:
    """Copy the boxes of a message into the model."""
    for asked, number, view in zip(message.asked, message.targets, message.views(data), strict=True):
        needed, tensors = targets[number]
        for tensor in tensors:
            as_bytes(tensor[asked.box.relative_to(needed.box).slices()]).copy_(as_bytes(view))


def _naming(error: CommError, names: Sequence[str]) -> CommError:
    """The same error, with the tensors that this rank was sending and receiving."""
    known = list(dict.fromkeys(names))
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    found = type(error)(
        f"a transfer of weights ended while this rank sent or received {', '.join(known[:_NAMED]) or 'nothing'}{more}, "
        f"so the receivers' models may have values of two versions: {error}"
    )
    found.missing, found.reports = error.missing, error.reports
    return found
