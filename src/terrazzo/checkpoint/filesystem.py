"""Writing and reading checkpoints in terrazzo's own format: `FileSystemWriter`, `FileSystemReader`.

Both are thin: the plan's execution is in `native`, the touching of files in `stores`.  `NativeWriter` and
`NativeReader` are the same for any `Store`.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.futures import Future

from terrazzo.checkpoint import objects
from terrazzo.checkpoint.events import LOGGER
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from terrazzo.checkpoint.native.cleaning import decode_manifest, read_manifest, remove_leftovers
from terrazzo.checkpoint.native.contents import metadata_of
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, is_file_of_save, lease_name
from terrazzo.checkpoint.native.manifest import TYPED, Manifest
from terrazzo.checkpoint.native.merging import PartResults
from terrazzo.checkpoint.native.reader import Reading
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.writer import (
    FilesOfRank,
    WriteOptions,
    commit,
    discard,
    write_part,
)
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from terrazzo.checkpoint.staging import BlockingAsyncStager
from terrazzo.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from terrazzo.checkpoint.stores import ABSENT, Absent, Lease, Store, Version, is_url, store_at
from terrazzo.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, UnsupportedValueError


class NativeWriter(StorageWriter):
    """Writes the native format into a store."""

    def __init__(self, store: Store, options: WriteOptions | None = None, *, overwrite: bool = True) -> None:
        self.store = store
        self.options = options or WriteOptions()
        self.overwrite = overwrite
        self.base: Store | None = None  # a checkpoint whose chunks need not be written again
        self.save_id = ""  # of the save that is under way
        self._files: FilesOfRank | None = None
        self._manifest: Manifest | Root | None = None
        self._replacing: Absent | Version = ABSENT  # what was there when the save began
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lease": None}  # a lease belongs to the process that took it

    @property
    def plans_alone(self) -> bool:
        """Whether ranks need not send their plans to the coordinator for this writer's sake."""
        return type(self).prepare_global_plan is NativeWriter.prepare_global_plan

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._release()
        self._files = None
        self._manifest = None
        self._check_id(checkpoint_id)

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        _check_location(self, self.store, checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.store.prepare()
        self.save_id = uuid.uuid4().hex[:12]
        if is_coordinator:
            # First of all, for whoever commits from now on is in this save's way.
            try:
                self._replacing = self.store.get(MANIFEST)[1]
            except FileNotFoundError:
                self._replacing = ABSENT
            if not self.overwrite and not isinstance(self._replacing, Absent):
                raise CheckpointExistsError(
                    f"{self.store.location} holds a checkpoint; save elsewhere, or with overwrite=True"
                )
            for name in remove_leftovers(self.store):
                LOGGER.warning("%s: removed %s, which an unfinished save left behind", self.store.location, name)
            self._lease = self.store.lease(lease_name(self.save_id))

    def _release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save_id = self.save_id or uuid.uuid4().hex[:12]
        return [self.place(plan, save_id, rank) for rank, plan in enumerate(plans)]

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        """The plan of a rank with the names of its data files settled."""
        return replace(plan, storage_data=FilesOfRank(save_id, rank))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(plan.storage_data, FilesOfRank):
            raise CheckpointError("the plan has not passed through this writer's prepare_global_plan")
        self._files = plan.storage_data
        part = write_part(self.store, plan, planner, plan.storage_data, self.options, self.base)
        future: Future[Any] = Future()
        future.set_result(PartResults(part))
        return future

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        parts = []
        for rank, result in enumerate(results):
            if not isinstance(result, PartResults):
                raise CheckpointError(f"the results of rank {rank} do not come from this writer's write_data")
            parts.append(result.part)
        save_id = self._files.save_id if self._files is not None else uuid.uuid4().hex[:12]
        features = ("zstd",) if self.options.compression else ()
        self._manifest = commit(
            self.store, parts, save_id, metadata.planner_data, replacing=self._replacing, features=features
        )
        self._describe(metadata)
        self._release()
        try:
            remove_leftovers(self.store)
        except OSError as error:  # the checkpoint is valid; the next save removes what is left
            LOGGER.warning("%s: files of the replaced checkpoint could not be removed: %s", self.store.location, error)

    def _describe(self, metadata: Metadata) -> None:
        """Make `metadata` say what has been stored."""
        if self._manifest is not None:
            stored = metadata_of(self._manifest, self.storage_meta())
            metadata.state_dict_metadata = stored.state_dict_metadata
            metadata.storage_data = stored.storage_data
            metadata.storage_meta = stored.storage_meta
            metadata.version = stored.version

    def committed(self) -> bytes:
        """What the other ranks need to describe the checkpoint: its manifest."""
        if self._manifest is None:
            raise CheckpointError("nothing has been committed")
        return bytes(self._manifest.data)

    def describe_committed(self, data: bytes) -> Metadata:
        """The checkpoint's metadata, from what the coordinator's `committed` returned."""
        self._manifest = decode_manifest(data, self.store.location)
        return metadata_of(self._manifest, self.storage_meta())

    def abandon(self) -> None:
        """The save has failed on some rank: remove what this rank has written."""
        if self._files is not None:
            save_id, rank = self._files.save_id, self._files.rank
            names = [entry.key for entry in self.store.list()]
            discard(self.store, [name for name in names if is_file_of_save(name, save_id, rank)])
        self._release()

    def may_abandon(self) -> bool:
        """After `finish` failed: whether the checkpoint is certainly not valid, so that its files are of no use."""
        try:
            return self._files is None or read_manifest(self.store).head.save_id != self._files.save_id
        except FileNotFoundError:
            return True
        except (OSError, CheckpointError):
            return False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a store has to be given

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(self.store.location, self._files.save_id if self._files is not None else None)


class FileSystemWriter(BlockingAsyncStager, NativeWriter):
    """Writes checkpoints into folders, in the native format.

    A folder is one of a file system, or a URL: `s3://bucket/prefix`, `gs://`, `az://` (see docs/stores.md).  It holds
    one checkpoint.  Saving into one that holds a checkpoint replaces it, at the very end and at
    once: until then, and if the save fails or is killed at any point, the old one stays.  With
    `overwrite=False` it is an error.

    Args:
        path: The folder; `save(checkpoint_id=...)` names another.
        single_file_per_rank: One data file per rank, or one per tensor.
        sync_files: Wait until everything is on the disk; without it a loss of power may lose the checkpoint.
        thread_count: Threads that write at once.
        per_thread_copy_ahead: Bytes of buffer for what cannot be written from where it is (accelerator memory).
        cache_staged_state_dict: Keep the memory that `async_save` copies to, for the next time.
        overwrite: Whether a checkpoint that is there may be replaced.
        compression: Store tensors compressed (zstd, after shuffling their bytes): smaller, and slower to write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        *,
        compression: bool = False,
    ) -> None:
        if _extensions:
            raise UnsupportedValueError("the native format has no stream extensions")
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        options = WriteOptions(single_file_per_rank, max(thread_count, 1), per_thread_copy_ahead, compression)
        self._durable = sync_files
        NativeWriter.__init__(self, self._open_store(path), options, overwrite=overwrite)
        self.path = _path(path)

    def _open_store(self, path: str | os.PathLike[str]) -> Store:
        return store_at(path, durable=self._durable)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the next checkpoint goes."""
        return self.path

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            self.path = _path(checkpoint_id)
            self.store = self._open_store(checkpoint_id)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of the state dict in host memory: `async_save` writes this one."""
        return super().stage(state_dict)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_place(checkpoint_id)


class NativeReader(StorageReader):
    """Reads the native format from a store.

    With `verify` (the default) every byte that is used is compared with its checksum.
    """

    plans_alone = True

    def __init__(self, store: Store, *, verify: bool = True) -> None:
        self.store = store
        self.verify = verify
        self.bytes_read = 0
        self._manifest: Manifest | Root | None = None
        self.load_id = uuid.uuid4().hex[:12]  # of the load that is under way
        self._reading: Reading | None = None  # what it has learned of the files is kept from one read to the next

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._manifest = None
        self._reading = None
        self.bytes_read = 0
        self.load_id = uuid.uuid4().hex[:12]
        self._check_id(checkpoint_id)

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        _check_location(self, self.store, checkpoint_id)

    def read_metadata(self) -> Metadata:
        try:
            self._manifest = read_manifest(self.store)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"there is no committed checkpoint at {self.store.location} (no {MANIFEST})"
            ) from error
        head = self._manifest.head
        return metadata_of(self._manifest, StorageMeta(self.store.location, head.save_id, self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if isinstance(metadata.storage_data, (Manifest, Root)):
            self._manifest = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._manifest is None:
            self.read_metadata()
        assert self._manifest is not None
        reading = self._reading
        if reading is None or reading.manifest is not self._manifest:
            reading = self._reading = Reading(self.store, self._manifest, verify=self.verify)
        before = reading.bytes_read
        tensors = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_object(reading, item, planner)
            else:
                tensors.append(item)
        reading.read_items(tensors, planner)
        self.bytes_read += reading.bytes_read - before
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def digests(self) -> dict[str, tuple[bytes, ...]]:
        """For each tensor, a digest of each of its chunks: of its box, and of the checksums of its bytes."""
        if self._manifest is None:
            self.read_metadata()
        if not isinstance(self._manifest, Root):
            return {}
        return PartIndexes(self._manifest, self.store).digests()

    def _load_object(self, reading: Reading, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        kind, payload = reading.read_object(name)
        if kind != TYPED:
            planner.load_bytes(item, io.BytesIO(payload))
            return
        try:
            value = objects.decode(payload, allow_pickle=getattr(planner, "allow_pickle", False))
        except CheckpointError as error:
            raise type(error)(f"{name!r}: {error}") from error
        planner.load_bytes(item, objects.ObjectBytes(value, payload))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a store has to be given


class FileSystemReader(NativeReader):
    """Reads checkpoints of the native format from folders, and from URLs."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None, *, verify: bool = True) -> None:
        super().__init__(store_at(path), verify=verify)
        self.path = _path(path)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.path

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            self.path = _path(checkpoint_id)
            self.store = store_at(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_place(checkpoint_id)


def _path(path: str | os.PathLike[str]) -> str | Path:
    return os.fspath(path) if is_url(path) else Path(path)


def _check_location(user: object, store: Store, checkpoint_id: str | os.PathLike[str] | None) -> None:
    if checkpoint_id is not None and os.fspath(checkpoint_id) != store.location:
        raise CheckpointError(
            f"this {type(user).__name__} was made for {store.location} and cannot go to "
            f"{os.fspath(checkpoint_id)!r}; make one with the store of that place, and pass no checkpoint_id"
        )


def _is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether this names a folder that is there or could be made, or something behind a URL."""
    if is_url(checkpoint_id):
        return True
    path = Path(checkpoint_id)
    return not path.exists() or path.is_dir()  # in this order: another rank may be making it
