"""Receive versions from a store: a full one and the changes since, of which each rank reads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec
import torch

from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.storage import NativeReader
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.checkpoint.tools.lazy import Checkpoint
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError
from terrazzo.layout import Box
from terrazzo.publish.delta import Change, in_box, read, runs_of
from terrazzo.publish.host_copy import HostCopy
from terrazzo.publish.parts import RESERVED, TensorInfo
from terrazzo.publish.to_store import CHANGES, DATA, RECORD, VersionRecord
from terrazzo.publish.versions import Version, Versions

_AT_ONCE: Final = 32 << 20  # bytes of changes that are read at once

Match = Callable[[Mapping[str, TensorInfo], Mapping[str, str]], HostCopy]


class StoreSource:
    """Reads the newest version from a store, on one rank.

    `match` allocates the memory for the tensors of a full version, or raises if they do not fit the model.
    """

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
        self.host_copy.all_dirty()

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
