"""`Publisher`: what a trainer has, made available to others version by version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import nn

from terrazzo.checkpoint.plan.digest import digest_of_tensor
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import DivergentValueError, PublishError
from terrazzo.publish.channel import TRANSFER_LIMIT, Channel
from terrazzo.publish.parts import About, Parts, RenameLike, parts_of
from terrazzo.publish.shares import Share, described, refuse_differences, share_of
from terrazzo.publish.snapshot import Snapshot, published_dtype
from terrazzo.publish.to_channel import ChannelSender
from terrazzo.publish.to_store import Policy, StoreSender
from terrazzo.publish.versions import Version, Versions
from terrazzo.publish.working import Side, raise_if_any, told


class Publisher:
    """Publishes a model's weights, from all ranks that have it, to receivers of any other layout, world and dtype.

    All ranks make one with the same arguments and call its methods together.  Each publishes its own part, so nowhere
    is there a full tensor.  `publish` returns when this rank's part has been copied to host memory, and the rest goes
    on in the background.

    Into a folder, behind a URL or into a store go versions: each is full, or has what changed since the one before,
    exactly.  A version is there, whole, or it is not, whatever dies.

    Through a `Channel` the last version is sent directly to the receivers that ask for it, all of it each time.

    Memory: two copies of what this rank publishes, in the published dtype, on the host (one with `sparse=False`, or
    through a channel), and what a version writes while it is written, or the channel's `bucket_bytes`.

    Args:
        to: Where to: a folder, a URL, a store, or a `Channel`.
        model: The model, or tensors by name; of any layout.
        dtype: What floating-point tensors are published in; None: as they are.
        rename: Other names for publishing, as `terrazzo.integrations.huggingface.Rename` gives them.
        anchor_every: Every so many versions one is full.  1: all are.
        dense_above: A version is full also if more than this share of all bytes would be written.
        sparse: Find the single elements that have changed.  False: compare checksums of pieces of 4 MiB, which takes
            half of the memory.
        keep: So many versions stay, and those that they are based on.  What a receiver reads stays until it is read.
        process_group: The ranks that have the model; default: all.
        timeout: How long a rank waits for the slowest one; default: as long as the process group's collectives do.  Of
            a channel also how long a receiver is waited for; default: 2 minutes.

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
        self._side: Side[Version] = Side(
            process_group, timeout, f"publishing to {to if isinstance(to, Channel) else Place(to)}"
        )
        self._sender: StoreSender | ChannelSender
        with told():
            place = self._side.place()
            parts, self._described, self._share = self._agreed_share(place)
            abouts = {
                name: About(published_dtype(about.dtype, dtype), about.shape) for name, about in parts.abouts.items()
            }
            if isinstance(to, Channel):
                self._sender = ChannelSender(to, abouts, self._share.aliases, timeout or TRANSFER_LIMIT)
            else:
                self._sender = StoreSender(Versions(Place(to)), policy, abouts, self._share.aliases)
            own = [parts.parts[number] for number in self._share.own]
            self._snapshots = [Snapshot(own, dtype) for _ in range(self._sender.snapshots)]
            self._number = self._sender.begin(place, self._snapshots[0])
        self._last: Version | None = None
        self._open = True

    def _agreed_share(self, place: Any) -> tuple[Parts, bytes, Share]:
        parts: list[Parts] = []

        def describe() -> bytes:
            parts.append(parts_of(self._model, self._rename))
            return described(parts[0])

        everyone = place.reduce(describe, msgspec.msgpack.encode)
        return parts[0], described(parts[0]), share_of(msgspec.msgpack.decode(everyone, type=list[bytes]), place.rank)

    @property
    def last(self) -> Version | None:
        """What was published last by this publisher, as far as that is known here: see `wait`."""
        return self._last

    def publish(self, version: int | None = None) -> int:
        """Publish what the model has now, and return the version's number.

        One version is under way at a time: a call waits until the one before is written.  An error in the background
        comes out of the next call, or of `wait`, on every rank; the version after it is full.

        Args:
            version: Its number, the training step for instance; None: one more than the last.
        """
        self._check_open()
        self._sender.settle()
        result, earlier = self._side.outcome()
        self._last = result or self._last
        with told():
            place = self._side.place()
            raise_if_any(place, earlier)
        snapshot = self._snapshots[-1]
        number = (0 if self._number is None else self._number + 1) if version is None else int(version)

        def take() -> bytes:
            parts = parts_of(self._model, self._rename)
            if described(parts) != self._described:
                raise PublishError("the model has other tensors, or another layout, than when this Publisher was made")
            snapshot.take([parts.parts[own] for own in self._share.own])
            digests = [digest_of_tensor(parts.parts[place].data) for place in self._share.compared]
            mine = dict(zip(self._share.peers, digests, strict=True))
            return msgspec.msgpack.encode((number, msgspec.msgpack.encode(mine)))

        def announce(parts: list[bytes]) -> bytes:
            _refuse_differences(parts)
            self._sender.announce(number)
            return b""

        with told():
            place.reduce(take, announce)
            beside = self._side.place_beside()
        self._number = number
        old = self._snapshots[0] if len(self._snapshots) > 1 else None
        self._snapshots.reverse()
        self._sender.starting()
        self._side.start(lambda: self._sender.send(beside, number, snapshot, old))
        return number

    def wait(self) -> Version | None:
        """Wait until what was published last is there for receivers, and say what it took; on all ranks together.

        Directly: until all receivers that have come have it; `CommTimeout` if one does not take it in time.
        """
        self._check_open()
        running = self._side.running
        if isinstance(self._sender, ChannelSender) and running is not None:
            sender = self._sender
            with told():
                self._side.place().together(lambda: sender.wait_until_taken(running.done))
            if not running.done():
                self._last = sender.last
                return self._last
        result, error = self._side.outcome()
        self._last = result or self._last
        with told():
            raise_if_any(self._side.place(), error)
        return self._last

    def close(self) -> None:
        """Wait for the last version as `wait` does, and end."""
        if self._open:
            try:
                self.wait()
            finally:
                self._end()

    def _end(self) -> None:
        self._open = False
        self._sender.settle()
        self._side.outcome()
        self._sender.close()
        self._side.close()

    def _check_open(self) -> None:
        if not self._open:
            raise PublishError("this Publisher has been closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may not come
            self._end()


def _refuse_differences(parts: list[bytes]) -> None:
    said = [msgspec.msgpack.decode(part, type=tuple[int, bytes]) for part in parts]
    numbers = [number for number, _ in said]
    if len(set(numbers)) > 1:
        raise DivergentValueError(f"ranks publish different versions: {numbers}")
    refuse_differences([digests for _, digests in said])
