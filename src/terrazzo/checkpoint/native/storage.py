"""The writer and the reader of the native format, for any `Store`: `NativeWriter` and `NativeReader`."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from terrazzo.checkpoint.metadata import Metadata, StorageMeta
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.commit import Commit, committed_manifest, remove_leftovers
from terrazzo.checkpoint.native.contents import StoredPlaces, metadata_of
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, is_file_of_save
from terrazzo.checkpoint.native.merging import merge
from terrazzo.checkpoint.native.names import leave_marker
from terrazzo.checkpoint.native.parts import PartResults
from terrazzo.checkpoint.native.requests import Requests
from terrazzo.checkpoint.native.root import TYPED, Root
from terrazzo.checkpoint.native.rows import Row, Target
from terrazzo.checkpoint.native.tensors import bytes_of, empty
from terrazzo.checkpoint.native.writer import FilesOfRank, WriteOptions, discard, write_part
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.storage import WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.torch_api.storages import RowWriter, TargetReader
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointExistsError, CheckpointFormatError


class NativeWriter(RowWriter):
    """Writes the native format into a store."""

    def __init__(self, store: Store, options: WriteOptions | None = None, *, overwrite: bool = True) -> None:
        self.store = store
        self.options = options or WriteOptions()
        self.overwrite = overwrite
        self.base: Store | None = None  # a checkpoint whose chunks need not be written again
        self._files: FilesOfRank | None = None
        self._manifest: Root | None = None
        self._commit = Commit(store, MANIFEST)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._commit.release()
        self._files = None
        self._manifest = None
        self.base = None
        self._check_id(checkpoint_id)

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        _check_location(self, self.store, checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.store.prepare()
        self.save_id = uuid.uuid4().hex[:12]
        if is_coordinator:
            # First of all, because a save that commits from now on conflicts with this one.
            self._commit = Commit(self.store, MANIFEST)
            data = self._commit.begin(overwrite=self.overwrite)
            named: Collection[str] = ()
            try:
                named = () if data is None else Root(data, self.store.location).files
            except CheckpointCorruptError:
                pass  # it is replaced, and what it needed stays until then
            except CheckpointFormatError as error:
                raise CheckpointExistsError(
                    f"{self.store.location} holds a checkpoint that this release cannot read, so it is not replaced: "
                    f"{error}; save elsewhere, or move it away"
                ) from error
            for name in remove_leftovers(self.store, named, commit=self._commit):
                LOGGER.warning("%s: removed %s, which an unfinished save left behind", self.store.location, name)
            self._commit.hold(self.save_id)

    def write(self, rows: Sequence[Row], arranged: bytes, rank: int) -> Sequence[WriteResult]:
        self._files = FilesOfRank(arranged.decode(), rank)
        return PartResults(write_part(self.store, rows, self._files, self.options, self.base))

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        parts = [result.part for result in results if isinstance(result, PartResults)]
        if len(parts) < len(results):
            rank = next(rank for rank, result in enumerate(results) if not isinstance(result, PartResults))
            raise CheckpointError(f"the results of rank {rank} do not come from this writer's write_data")
        save_id = self._files.save_id if self._files is not None else uuid.uuid4().hex[:12]
        features = ("zstd",) if self.options.compression else ()
        data = merge(parts, save_id, metadata.planner_data, features)
        root = Root(data, self.store.location)
        listed = self.store.list()
        self._commit.check_alive(root.files, listed)
        self._commit.put(data)
        self._commit.check_committed()
        self._manifest = root
        leave_marker(self.store)
        stored = metadata_of(root, self.store, self.storage_meta())
        metadata.state_dict_metadata = stored.state_dict_metadata
        metadata.storage_data = stored.storage_data
        metadata.storage_meta = stored.storage_meta
        metadata.version = stored.version
        try:
            # With the list from before the commit: what has been written since belongs to saves that have not ended.
            remove_leftovers(self.store, root.files, listed, self._commit)
        except OSError as error:  # the checkpoint is valid; the next save removes what is left
            LOGGER.warning("%s: files of the replaced checkpoint could not be removed: %s", self.store.location, error)
        finally:
            self._commit.release()

    def build_on(self, base: Store) -> None:
        self.base = base

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        if not isinstance(results, PartResults):
            raise CheckpointError("these results do not come from this writer's write_data")
        return results.encode()

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        return PartResults.decode(data)

    def committed(self, metadata: Metadata) -> bytes:
        if self._manifest is None:
            raise CheckpointError("nothing has been committed")
        return bytes(self._manifest.data)

    def describe_committed(self, data: bytes) -> Metadata:
        self._manifest = Root(data, self.store.location)
        return metadata_of(self._manifest, self.store, self.storage_meta())

    def abandon(self) -> None:
        if self._files is not None:
            save_id, rank = self._files.save_id, self._files.rank
            names = [entry.key for entry in self.store.list()]
            discard(self.store, [name for name in names if is_file_of_save(name, save_id, rank)])
        self._commit.release()

    def may_abandon(self) -> bool:
        return self._commit.is_absent()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(self.store.location, self._files.save_id if self._files is not None else None)


class NativeReader(TargetReader):
    """Reads the native format from a store.

    With `verify` (the default) every byte that is used is compared with its checksum.
    """

    def __init__(self, store: Store, *, verify: bool = True) -> None:
        self.store = store
        self.verify = verify
        self._manifest: Root | None = None
        self.load_id = uuid.uuid4().hex[:12]  # of the load that is under way
        # Where things are, as PyTorch's readers have it, for classes built on this one.
        self.storage_data: Any = {}
        # Kept from one read to the next: indexes, and which files have been checked.
        self._opened: tuple[PartIndexes, Requests] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._manifest = None
        self._opened = None
        self.load_id = uuid.uuid4().hex[:12]
        self._check_id(checkpoint_id)

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        _check_location(self, self.store, checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._manifest = committed_manifest(self.store)
        return self._described()

    def root(self) -> bytes | None:
        """The root of the checkpoint that is there now, for `use_root` of readers on other ranks; None if it has none,
        being of another format."""
        self.read_metadata()
        return None if self._manifest is None else bytes(self._manifest.data)

    def use_root(self, data: bytes) -> Metadata:
        """Read the checkpoint of this root, which another rank's `root` returned, and no later one."""
        self._manifest = Root(data, self.store.location)
        return self._described()

    def _described(self) -> Metadata:
        assert self._manifest is not None
        save_id = self._manifest.head.save_id
        return metadata_of(self._manifest, self.store, StorageMeta(self.store.location, save_id, self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        self.storage_data = metadata.storage_data
        if isinstance(metadata.storage_data, StoredPlaces):
            self._manifest = metadata.storage_data.root

    @torch.no_grad()
    def fill(self, targets: Sequence[Target]) -> None:
        index, requests = self._open()
        parts = [(target, part) for target in targets for part in target.parts]
        found = index.find([(target.source, part) for target, part in parts])
        try:
            requests.read(each.of(parts[each.number][0].part(parts[each.number][1])) for each in found)
        finally:
            requests.release()
            self.bytes_read = index.bytes_read + requests.bytes_read

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        for name in names:
            kind, payload = self._object(name)
            yield objects.received(name, kind == TYPED, payload, allow_pickle)

    def _object(self, name: str) -> tuple[int, bytes]:
        """The kind and the bytes of a value that is not a tensor."""
        index, _ = self._open()
        entry = index.root.objects.get(name)
        if entry is not None:
            return entry.kind, entry.data
        value = index.value(name)
        data = empty(name, value.box.lengths, torch.uint8)
        self.fill([Target(name, name, data, value.box, value.parts)])
        return value.kind, bytes(bytes_of(data))

    def _open(self) -> tuple[PartIndexes, Requests]:
        if self._manifest is None:
            self.read_metadata()
        assert self._manifest is not None
        if self._opened is None or self._opened[0].root is not self._manifest:
            self._opened = PartIndexes(self._manifest, self.store), Requests(self.store, verify=self.verify)
        return self._opened

    def digests(self) -> dict[str, bytes]:
        """A digest of each value: see `Checkpoint.digests`."""
        return self._open()[0].digests()


def _check_location(user: object, store: Store, checkpoint_id: str | os.PathLike[str] | None) -> None:
    if checkpoint_id is not None and os.fspath(checkpoint_id) != store.location:
        raise CheckpointError(
            f"this {type(user).__name__} was made for {store.location} and cannot go to "
            f"{os.fspath(checkpoint_id)!r}; make one with the store of that place, and pass no checkpoint_id"
        )
