"""Versions through a store: a version is a checkpoint of all tensors, or of the changes.

A receiver reads a full one and the changes since, of which each rank reads only what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.default_planner import DefaultSavePlanner
from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.plan.sharded import ChunkedTensor, Holders
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.checkpoint.run.save_session import SaveSession
from terrazzo.checkpoint.tools.lazy import Checkpoint
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    PublishValueError,
)
from terrazzo.layout import Box
from terrazzo.publish.delta import (
    Change,
    ChangedWindow,
    differences,
    in_box,
    read,
    runs_of,
    sums_of,
    total_bytes,
    written,
)
from terrazzo.publish.host_copy import HostCopy, Match, Snapshot, SnapshotWindow
from terrazzo.publish.parts import RESERVED, PublishedShares, TensorInfo
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

    def __init__(self, versions: Versions, policy: Policy, infos: Mapping[str, TensorInfo]) -> None:
        self._versions = versions
        self._policy = policy
        self._infos = infos  # of this rank
        self._aliases: dict[str, str] = {}
        self._published = Published()  # the list, on the coordinator
        self._last: Version | None = None  # the version whose changes the next one may have
        self._since_full = 0
        self._sums: list[int] = []
        self.snapshots = 2 if policy.sparse and policy.anchor_every > 1 else 1

    def begin(self, team: Team, shares: PublishedShares) -> int | None:
        """Take over the list from any earlier publisher. Returns the number of the newest version, or None."""
        self._aliases = shares.aliases

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
            at = int(team.first(lambda: b"%d" % self._versions.free_place(self._published)))
            store = self._versions.store_of(at)
            writer = NativeWriter(store, overwrite=False)
            session = SaveSession(
                DefaultSavePlanner(), writer, replace(team, doing=f"publishing {store.location}"), None
            )
            try:
                metadata = session.run(lambda: state)
                break
            except (ConflictError, CheckpointExistsError):  # on all ranks: another publisher has taken this folder
                if not last:
                    raise
        assert metadata.storage_meta is not None
        return at, metadata.storage_meta.save_id or ""

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

        return msgspec.msgpack.decode(team.reduce(lambda: msgspec.msgpack.encode(nbytes), enlist), type=Version)

    def announce(self) -> None:
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


# ------------------------------------------------------------------ receiving


_AT_ONCE: Final = 32 << 20  # bytes of changes that are read at once


class StoreSource:
    """Reads the newest version from a store, on one rank."""

    def __init__(self, versions: Versions, match: Match) -> None:
        self._versions = versions
        self._match = match
        self._held: Version | None = None  # the version that the host copy has completely
        self._published: Mapping[str, TensorInfo] = {}
        self.host_copy: HostCopy | None = None
        self.bytes_read = 0

    @property
    def doing(self) -> str:
        return f"receiving from {self._versions.location}"

    def fetch(self, team: Team) -> Version | None:
        """Read the newest version into the host copy, on all ranks together; None if there is none."""
        with ExitStack() as holding:
            held = self._held

            def find() -> bytes:
                return msgspec.msgpack.encode(list(holding.enter_context(self._versions.hold_needed(held))))

            versions = msgspec.msgpack.decode(team.first(find), type=list[Version])
            if versions:
                self._held = None  # if a rank fails, the host copy has no complete version
                team.together(lambda: self._read(versions))
                self._held = versions[-1]
        return self._held

    def _read(self, versions: Sequence[Version]) -> None:
        for version in versions:
            if version.is_full:
                self._read_full(version)
            else:
                self._read_changes(version)

    def _opened(self, version: Version) -> tuple[Checkpoint, VersionRecord]:
        store = self._versions.store_of(version.place)
        opened = Checkpoint(NativeReader(store))
        meta = opened.metadata.storage_meta
        if meta is None or meta.save_id != version.id:
            raise CheckpointNotFoundError(
                f"{store.location} is another checkpoint than version {version.number} in published.json"
            )
        try:
            record = msgspec.json.decode(opened[RECORD], type=VersionRecord)
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
            raise CheckpointCorruptError(f"{store.location}: the version's record cannot be read: {error!r}") from error
        return opened, record

    def _read_full(self, version: Version) -> None:
        opened, record = self._opened(version)
        published = {
            name: TensorInfo(entry.properties.dtype, tuple(entry.size))
            for name, entry in opened.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(RESERVED)
        }
        self.host_copy = self._match(published, record.aliases)
        self._published = published
        opened.read_into((slot.source, slot.box, slot.data) for slot in self.host_copy.slots)
        self.bytes_read += opened.bytes_read
        for slot in self.host_copy.slots:
            slot.is_dirty = True

    def _read_changes(self, version: Version) -> None:
        opened, _ = self._opened(version)
        assert self.host_copy is not None
        for name in list(opened):
            if not name.startswith(CHANGES):
                continue
            try:
                changes = msgspec.msgpack.decode(opened[name], type=list[Change])
            except (msgspec.MsgspecError, TypeError) as error:
                raise CheckpointCorruptError(f"version {version.number}: {name} cannot be read: {error}") from error
            wanted = [
                change
                for change in changes
                if any(slot.box.intersect(change.box) is not None for slot in self.host_copy.of(change.name))
            ]
            data = opened.tensor(DATA + name.removeprefix(CHANGES))
            assert data is not None
            for group in runs_of(wanted, _AT_ONCE):
                start, end = group[0].start, group[-1].start + group[-1].nbytes
                piece = data.read(Box((start,), (end - start,)))
                for change in group:
                    self._patch(change, piece[change.start - start :][: change.nbytes])
        self.bytes_read += opened.bytes_read

    @torch.no_grad()
    def _patch(self, change: Change, data: torch.Tensor) -> None:
        assert self.host_copy is not None
        places, values = read(change, data, self._published[change.name].dtype)
        window = change.box
        for slot in self.host_copy.of(change.name):
            common = slot.box.intersect(window)
            if common is None:
                continue
            if places is None:
                target = slot.data[common.relative_to(slot.box).slices()]
                target.copy_(values[common.relative_to(window).slices()])
            else:
                where, inside = in_box(places, window, slot.box)
                slot.data.view(-1)[where] = values[inside].to(slot.data.dtype)
            slot.is_dirty = True

    def close(self) -> None:
        """Do nothing: no file or connection is open between polls."""
