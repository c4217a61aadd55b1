"""`Publisher`: publishes a model's weights, version by version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch
from torch import nn

from terrazzo.checkpoint.plan.ownership import digests_of_tensors
from terrazzo.checkpoint.run.background import BackgroundWork, raise_if_any
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import DivergentValueError, PublishError
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.publish.by_channel import ChannelSender
from terrazzo.publish.by_store import Policy, StoreSender
from terrazzo.publish.channel import TRANSFER_LIMIT, Channel
from terrazzo.publish.host_copy import Snapshot
from terrazzo.publish.parts import (
    Parts,
    RenameLike,
    changed,
    described,
    parts_of,
    refuse_differences,
    shares_of,
)
from terrazzo.publish.versions import Version, Versions


class Publisher(ShownAsCall):
    """Publishes a model's weights to receivers of any other layout, number of ranks and dtype.

    All ranks of the model construct one with the same arguments and call its methods together. Each rank publishes its
    own shards; no full tensor is made. `publish` returns when this rank's part has been copied to host memory; a thread
    does the rest.

    In a folder, at a URL or in a store there is a list of versions. Each version is full, or has the exact changes
    since the version before it. If a process dies, a version is listed and complete, or not listed.

    Through a `Channel` the last version is sent directly to the receivers that ask for it, always in full. `publish`
    does not wait for receivers, whatever they do.

    Host memory: two copies of what this rank publishes, in the published dtype (one copy with `sparse=False`; through a
    channel one, and a second one if a version is published while one before it is being sent); and the bytes of the
    version that is being written, or the channel's `bucket_bytes`.

    Args:
        to: Where to publish: a folder, a URL, a store, or a `Channel`.
        model: The model, or tensors by name; of any layout.
        dtype: The dtype in which floating-point tensors are published. None: their own.
        rename: The published names, if they differ from the model's: a `terrazzo.integrations.huggingface.Rename`.
        anchor_every: One of this many versions is full. 1: all are.
        dense_above: A version is full, too, if its changes take more than this share of all bytes.
        sparse: Find the elements that have changed. False: compare checksums of pieces of 4 MiB, which takes half of
            the memory.
        keep: How many versions to keep, besides those that they are based on and those that a receiver is reading.
        process_group: The ranks that have the model; default: all.
        timeout: How long a rank waits for the others; default: the process group's time limit. With a channel it is
            also how long to wait for a receiver; default: 2 minutes.

    >>> import tempfile
    >>> from terrazzo.publish import Receiver
    >>> folder, model, served = tempfile.mkdtemp(), nn.Linear(2, 1), nn.Linear(2, 1)
    >>> with Publisher(folder, model) as publisher:
    ...     publisher.publish(100)
    100
    >>> receiver = Receiver(folder, served)
    >>> receiver.poll(), receiver.apply()
    (100, 100)
    >>> served.weight.equal(model.weight)
    True
    """

    def __init__(
        self,
        to: str | os.PathLike[str] | Store | Channel,
        model: nn.Module | Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        rename: RenameLike | None = None,
        anchor_every: int = 10,
        dense_above: float = 0.5,
        sparse: bool = True,
        keep: int = 2,
        process_group: Any = None,
        timeout: timedelta | None = None,
    ) -> None:
        policy = Policy(anchor_every, dense_above, keep, sparse)
        self._model = model
        self._rename = rename
        self._dtype = dtype
        self._side: BackgroundWork[Version] = BackgroundWork(
            process_group, timeout, f"publishing to {to if isinstance(to, Channel) else Place(to)}"
        )
        self._sender: StoreSender | ChannelSender
        team = self._side.team()
        found: list[Parts] = []

        def describe() -> bytes:
            found.append(parts_of(model, rename))
            return described(found[0])

        tables = msgspec.msgpack.decode(team.reduce(describe, msgspec.msgpack.encode), type=list[bytes])
        shares = shares_of(tables, team.rank, dtype)
        (parts,), self._described = found, tables[team.rank]
        self._own, self._compared = shares.own[team.rank], shares.compared
        if isinstance(to, Channel):
            self._sender = ChannelSender(to, timeout or TRANSFER_LIMIT)
        else:
            infos = {name: shares.infos[name] for name in parts.infos}
            self._sender = StoreSender(Versions(Place(to)), policy, infos)
        own = [parts.parts[number] for number in self._own]
        self._snapshots = [Snapshot(own, dtype) for _ in range(self._sender.snapshots)]
        self._number = self._sender.begin(team, shares)
        self._last: Version | None = None
        self._open = True

    @property
    def last(self) -> Version | None:
        """The last version of which this rank knows that it was published; `wait` updates it."""
        return self._last

    def publish(self, version: int | None = None) -> int:
        """Publish the model's present values, and return the version's number.

        One version is written at a time: the call waits until the one before is complete. An error in the background is
        raised on every rank by the next call, or by `wait`; the version after it is full.

        Args:
            version: Its number, for instance the training step. None: one more than the last.
        """
        team = self._caught_up()
        number = (0 if self._number is None else self._number + 1) if version is None else int(version)

        snapshots: list[Snapshot] = []

        def take() -> bytes:
            self._sender.settle()  # not before all ranks publish: until then receivers get the version before
            parts = parts_of(self._model, self._rename)
            if described(parts) != self._described:
                raise changed("this Publisher was constructed: construct another one")
            own = [parts.parts[number] for number in self._own]
            free = [each for each in self._snapshots if not self._sender.reads(each)]
            snapshots.append(free[-1] if free else Snapshot(own, self._dtype))
            snapshots[0].take(own)
            digests = digests_of_tensors([parts.parts[place].data for place, _ in self._compared])
            mine = {name: digest for (_, name), digest in zip(self._compared, digests, strict=True)}
            return msgspec.msgpack.encode((number, mine))

        def announce(parts: list[bytes]) -> None:
            said = [msgspec.msgpack.decode(part, type=tuple[int, dict[str, int]]) for part in parts]
            numbers = [number for number, _ in said]
            if len(set(numbers)) > 1:
                raise DivergentValueError(f"ranks publish different versions, in order of the ranks: {numbers}")
            refuse_differences([digests for _, digests in said])
            self._sender.announce()

        team.reduce(take, announce)
        beside = self._side.team_in_background()
        self._number = number
        (snapshot,) = snapshots
        others = [each for each in self._snapshots if each is not snapshot]
        old = others[0] if others else None
        self._snapshots = [snapshot, *others]  # the newest first
        self._side.start(lambda: self._sender.send(beside, number, snapshot, old))
        return number

    def wait(self) -> Version | None:
        """Wait until the last version is complete, and return it; on all ranks together.

        Through a channel: until all registered receivers have it; `CommTimeout` if one does not get it in time.
        """
        return self._wait(closing=False)

    def _wait(self, *, closing: bool) -> Version | None:
        team = self._caught_up()
        self._last = self._sender.wait(team, self._last, closing=closing)
        return self._last

    def _caught_up(self) -> Team:
        """The ranks, when the version before is complete; raises its error on all of them."""
        if not self._open:
            raise PublishError("this Publisher has been closed: construct another one")
        result, error = self._side.outcome()
        self._last = result or self._last
        team = self._side.team()
        raise_if_any(team, error)
        return team

    def close(self) -> None:
        """Wait for the last version as `wait` does, then close the connections.

        Through a channel: receivers that do nothing for 10 s, or do not get the version in time, are not waited for; a
        warning is logged.
        """
        if self._open:
            try:
                self._wait(closing=True)
            finally:
                self._end()

    def _end(self) -> None:
        self._open = False
        self._sender.settle()
        self._side.outcome()
        self._sender.close()
        self._side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not have failed, and would not wait with this one
            self._end()
