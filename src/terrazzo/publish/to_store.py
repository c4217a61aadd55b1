"""Publish into a store: a version is a checkpoint of all tensors, or of the changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.default_planner import DefaultSavePlanner
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.plan.sharded import ChunkedTensor, Holders
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.checkpoint.run.save_session import SaveSession
from terrazzo.errors import CheckpointExistsError, ConflictError, PublishValueError
from terrazzo.layout import Box
from terrazzo.publish.delta import ChangedWindow, differences, sums_of, total_bytes, written
from terrazzo.publish.parts import RESERVED, TensorInfo
from terrazzo.publish.snapshot import Snapshot, SnapshotWindow
from terrazzo.publish.versions import Published, Version, Versions

RECORD: Final = f"{RESERVED}record"
CHANGES: Final = f"{RESERVED}changes/"  # followed by the rank in the process group
DATA: Final = f"{RESERVED}data/"
_TRIES: Final = 5


class VersionRecord(msgspec.Struct, frozen=True):
    """The entry of a version's checkpoint that describes it."""

    number: int
    base: str | None  # the id of the version whose changes these are
    aliases: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """When a version is full: every `anchor_every`-th, and when changes take more than `dense_above` of all bytes.

    With `sparse`, elements are compared, else checksums of windows. `keep` versions stay, and those they are based on.
    """

    anchor_every: int = 10
    dense_above: float = 0.5
    keep: int = 2
    sparse: bool = True

    def __post_init__(self) -> None:
        if self.anchor_every < 1 or self.keep < 1:
            raise PublishValueError(f"anchor_every and keep must be 1 or more, not {self.anchor_every} and {self.keep}")
        if not 0 <= self.dense_above <= 1:
            raise PublishValueError(f"dense_above must be a share of all bytes, from 0 to 1, not {self.dense_above}")


class StoreSender:
    """Publishes into a store, on one rank."""

    def __init__(
        self, versions: Versions, policy: Policy, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str]
    ) -> None:
        self._versions = versions
        self._policy = policy
        self._infos = infos  # of this rank
        self._aliases = dict(aliases)
        self._published = Published()  # the list, on the coordinator
        self._last: Version | None = None  # the version whose changes the next one may have
        self._since_full = 0
        self._sums: list[int] = []
        self.snapshots = 2 if policy.sparse and policy.anchor_every > 1 else 1

    def begin(self, team: Team, snapshot: Snapshot) -> int | None:
        """Take over the list from any earlier publisher. Returns the number of the newest version, or None."""

        def take_over() -> bytes:
            self._published = self._versions.take_over()
            newest = self._published.newest
            return msgspec.msgpack.encode(None if newest is None else newest.number)

        return msgspec.msgpack.decode(team.first(take_over), type=int | None)

    def send(self, team: Team, number: int, new: Snapshot, old: Snapshot | None) -> Version:
        """Publish a snapshot; `old` is the previous one. After an error the next version is full."""
        base, self._last = self._last, None
        windows = new.windows()
        sums = [] if self._policy.sparse or self._policy.anchor_every == 1 else sums_of(new, windows)
        before, self._sums = self._sums, sums
        changes: list[ChangedWindow] | None = None
        if base is not None and self._since_full + 1 < self._policy.anchor_every:
            changes = self._changes(team, new, old if self._policy.sparse else None, windows, before)
        if changes is None:
            base = None
            state = self._whole(team, number, new)
            nbytes = new.nbytes
        else:
            assert base is not None
            state = self._delta(team, VersionRecord(number, base.id), changes, new)
            nbytes = total_bytes(changes)
        at, save_id = self._save(team, state)
        self._last = self._listed(team, number, at, save_id, base, (nbytes, new.nbytes))
        self._since_full = 0 if base is None else self._since_full + 1
        return self._last

    def _changes(
        self, team: Team, new: Snapshot, old: Snapshot | None, windows: Sequence[SnapshotWindow], before: Sequence[int]
    ) -> list[ChangedWindow] | None:
        """This rank's changes; None if all ranks' changes are so many that a full version is better."""
        found: list[ChangedWindow] = []

        def count() -> bytes:
            found.extend(differences(new, windows, old, before, self._sums))
            return msgspec.msgpack.encode((total_bytes(found), new.nbytes))

        answer = team.reduce(count, lambda parts: msgspec.msgpack.encode(_sums(parts)))
        changed, total = msgspec.msgpack.decode(answer, type=tuple[int, int])
        return None if changed > self._policy.dense_above * total else found

    def _whole(self, team: Team, number: int, new: Snapshot) -> dict[str, Any]:
        alone = Holders((team.global_rank,), frozenset(team.ranks))
        chunks: dict[str, dict[tuple[int, ...], tuple[Box, torch.Tensor]]] = {name: {} for name in self._infos}
        for name, box, tensor in zip(new.names, new.boxes, new.tensors, strict=True):
            chunks[name][box.offsets] = box, tensor
        state: dict[str, Any] = {
            name: ChunkedTensor(torch.Size(self._infos[name].shape), self._infos[name].dtype, found, alone)
            for name, found in chunks.items()
        }
        if team.is_coordinator:
            state[RECORD] = msgspec.json.encode(VersionRecord(number, None, self._aliases))
        return state

    def _delta(self, team: Team, record: VersionRecord, changes: list[ChangedWindow], new: Snapshot) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if changes:
            data = written(changes, new)
            box = Box.whole(data.shape)
            alone = Holders((team.global_rank,), frozenset(team.ranks))
            state[f"{DATA}{team.rank}"] = ChunkedTensor(data.shape, data.dtype, {box.offsets: (box, data)}, alone)
            state[f"{CHANGES}{team.rank}"] = msgspec.msgpack.encode([each.change for each in changes])
        if team.is_coordinator:
            state[RECORD] = msgspec.json.encode(record)
        return state

    def _save(self, team: Team, state: dict[str, Any]) -> tuple[int, str]:
        """Save the version; returns the number of its folder, and its id."""
        for last in reversed(range(_TRIES)):
            answer = team.first(lambda: b"%d" % self._versions.free_place(self._published))
            at = int(answer)
            store = self._versions.store_of(at)
            writer = NativeWriter(store, overwrite=False)
            session = SaveSession(
                DefaultSavePlanner(), writer, replace(team, doing=f"publishing {store.location}"), None
            )
            try:
                metadata = session.run(lambda: state)
            except (ConflictError, CheckpointExistsError):  # on all ranks: another publisher has taken this folder
                if not last:
                    raise
                continue
            assert metadata.storage_meta is not None
            return at, metadata.storage_meta.save_id or ""
        raise AssertionError("the loop returns or raises")

    def _listed(
        self, team: Team, number: int, at: int, save_id: str, base: Version | None, nbytes: tuple[int, int]
    ) -> Version:
        """Add the version to the list, and remove versions that the list does not need any more."""

        def enlist(parts: list[bytes]) -> bytes:
            written, total = _sums(parts)
            version = Version(number, at, save_id, None if base is None else base.place, written, total)
            longer = self._published.with_newest(version, self._policy.keep)
            try:
                self._versions.write(longer)
            except ConflictError:
                self._versions.discard(at)
                raise
            self._published = longer
            self._versions.clear(longer)
            return msgspec.msgpack.encode(version)

        answer = team.reduce(lambda: msgspec.msgpack.encode(nbytes), enlist)
        return msgspec.msgpack.decode(answer, type=Version)

    def announce(self, number: int) -> None:
        """Do nothing: a version is listed when it is complete."""

    def reads(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot must not change: never when `publish` asks, which has waited until all was written."""
        return False

    def settle(self) -> None:
        """Do nothing: `send` ends when the version is complete."""

    def wait(self, team: Team, last: Version | None, *, closing: bool) -> Version | None:
        """The last version, which is complete when `send` has ended."""
        return last

    def close(self) -> None:
        """Do nothing: no file or connection is open between versions."""


def _sums(parts: Sequence[bytes]) -> tuple[int, int]:
    pairs = [msgspec.msgpack.decode(part, type=tuple[int, int]) for part in parts]
    return sum(first for first, _ in pairs), sum(second for _, second in pairs)
