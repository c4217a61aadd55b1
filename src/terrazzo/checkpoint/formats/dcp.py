"""The format of `torch.distributed.checkpoint`, as one of the formats.

PyTorch's data files are named after ranks, so that a second save to a folder overwrites the first checkpoint while it
is still valid. The format does not require this. Here every save has its own file names, and the metadata replace the
old ones at the end, if these have not changed since the save began. Then the old data files are removed, and those
of killed saves.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from terrazzo._threads import results_of
from terrazzo.checkpoint.filesystem import DEFAULT_SUFFIX, InFolder
from terrazzo.checkpoint.formats import dcp_metadata
from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.registry import check_is_found, import_all
from terrazzo.checkpoint.formats.source import Source, copy_checkpoint
from terrazzo.checkpoint.formats.stored import StoredBox, file_at
from terrazzo.checkpoint.formats.table import TableReader
from terrazzo.checkpoint.formats.torch_archive import StoredTensor, open_archive, read_value
from terrazzo.checkpoint.formats.torch_save import write_archive
from terrazzo.checkpoint.formats.windows import Header, Value, Window, check_file, is_archive, read_header
from terrazzo.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.chunks import complete_parts
from terrazzo.checkpoint.native.commit import Commit, by_save
from terrazzo.checkpoint.native.contents import StorageInfo
from terrazzo.checkpoint.native.format import SEAL, lease_name, save_of
from terrazzo.checkpoint.native.objects import EncodedBytes, ObjectBytes, decode
from terrazzo.checkpoint.native.root import TENSOR
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.native.tensors import dtype_name
from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.planner import TensorWriteData
from terrazzo.checkpoint.storage import StorageReader, WriteResult
from terrazzo.checkpoint.stores import Entry, Place, Store, Upload
from terrazzo.checkpoint.stores.memory import MemoryStore
from terrazzo.checkpoint.torch_api.items import item_of, merged_entries
from terrazzo.checkpoint.torch_api.storages import RowWriter
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsafePickleError,
    UnsupportedValueError,
)
from terrazzo.layout.box import Box


class DCPReader(TableReader):
    """Reads checkpoints of `torch.distributed.checkpoint.save`.

    No code in the checkpoint is run: its pickles are read as plain data, and a pickle that refers to anything else
    raises `UnsafePickleError`.

    Args:
        path: The folder, or its URL. `load(checkpoint_id=...)` replaces it.
    """

    def _described(self) -> Metadata:
        store = self.place.store
        names = _metadata_files(self.files_at(store))
        if not names:
            raise CheckpointNotFoundError(f"there is no torch DCP checkpoint at {self.place} (no {METADATA})")
        names.sort(key=lambda name: name != f"__{self.rank}{METADATA}")  # this rank's own first
        parts = [dcp_metadata.parse(store.get(name)[0], f"{self.place}/{name}") for name in names]
        return dcp_metadata.merged(parts)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if metadata is not self._metadata:
            self._forget()
            self._metadata = metadata
        super().set_up_storage_reader(metadata, is_coordinator)

    def _forget(self) -> None:
        super()._forget()
        self._chunks: dict[MetadataIndex, StoredChunk] = {}
        self._headers: dict[StorageInfo, Header] = {}

    def rows_of(self, name: str) -> list[StoredBox]:
        entry = self.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        locate, store = self._locate, self.place.store
        return [StoredBox(chunk.box, store, partial(locate, name, entry, chunk)) for chunk in entry.chunks]

    def value(self, name: str) -> Any:
        location = self._location(MetadataIndex(name))
        window = self._window(location, name)
        if is_archive(window):
            return read_value(window)
        return EncodedBytes(window.read(0, window.length))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Place(checkpoint_id) / METADATA).is_file()

    # ------------------------------------------------- where things lie

    def _location(self, index: MetadataIndex) -> StorageInfo:
        location: StorageInfo | None = self.read_metadata().storage_data.get(index)
        if location is None:
            raise CheckpointCorruptError(f"{self.place}: the metadata have no position for {index}")
        if location.transform_descriptors:
            raise CheckpointFormatError(
                f"{self.place}/{location.relative_path}: {index.fqn} is stored through the stream extensions "
                f"{', '.join(location.transform_descriptors)}, which cannot be read: save it without extensions"
            )
        return location

    def _window(self, location: StorageInfo, what: str, *, to_end: bool = False) -> Window:
        store = self.place.store
        length = None if to_end else location.length
        return Window(store, self.file_at(store, location.relative_path), location.offset, length, what)

    def _locate(self, name: str, entry: TensorStorageMetadata, part: ChunkStorageMetadata) -> StoredChunk:
        index = MetadataIndex(name, part.offsets)
        found = self._chunks.get(index)
        if found is None:
            found = self._looked_up(name, self._location(index))
            # A file of another rank, or of another checkpoint, may have another tensor of the same name.
            if found.shape != tuple(part.sizes) or found.dtype != dtype_name(entry.properties.dtype):
                raise CheckpointCorruptError(
                    f"{self.place}/{found.file.name}: {name} is {found.dtype} of the shape {found.shape}, unlike in "
                    "the metadata"
                )
            self._chunks[index] = found
        return found

    def _looked_up(self, name: str, location: StorageInfo) -> StoredChunk:
        header = self._headers.get(location)
        if header is None:
            window = self._window(location, name)
            if is_archive(window):
                archive = open_archive(window)
                if not isinstance(archive.value, StoredTensor):
                    raise CheckpointCorruptError(f"{window.where} is a value, not a tensor")
                return archive.located(archive.value, name)
            # For files of safetensors, PyTorch gives the offset of the whole data for every tensor.
            header = self._headers[location] = read_header(self._window(location, name, to_end=True))
        found = header.tensors.get(name)
        if found is None:
            raise CheckpointCorruptError(f"{self.place}/{location.relative_path} does not have the tensor {name!r}")
        return found


def _metadata_files(names: Collection[str]) -> list[str]:
    """The file with the metadata, or those of each rank."""
    return [METADATA] if METADATA in names else _roots(names)


def _roots(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if name == METADATA or (name.startswith("__") and name.endswith(METADATA)))


class DCP(Format):
    """A folder with a `.metadata`, or with one of each rank."""

    name = "dcp"

    def find(self, found: Found) -> Place | None:
        return found.place if _metadata_files(found.names) else None

    def reader(self, place: Place) -> StorageReader:
        return DCPReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked, metadata = Checked(), DCPReader(place).read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            try:
                if isinstance(entry, TensorStorageMetadata):
                    complete_parts(name, entry.chunks, Box.whole(entry.size))
            except CheckpointError as error:
                checked.damage.append(Damage(METADATA, str(error), name))
        begun: set[tuple[str, int]] = set()  # all tensors of a safetensors file have the position of the file's data
        for index, at in sorted(
            metadata.storage_data.items(), key=lambda pair: (pair[1].relative_path, pair[1].offset)
        ):
            if (at.relative_path, at.offset) not in begun:
                begun.add((at.relative_path, at.offset))
                is_tensor = isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
                value = Value(index.fqn, at.offset, at.length, is_tensor)
                check_file(checked, place.store, at.relative_path, progress, value)
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        writer = DCPWriter(target.store, overwrite=how.overwrite)
        copy_checkpoint(Source(reader), writer, replace(how, allow_pickle=True))  # it stores all values so


_NAME: Final = re.compile(r"__[0-9]+_(?P<save>[0-9a-f]{12})(?:_[0-9]+)?\.distcp")
SUFFIX: Final = DEFAULT_SUFFIX


@dataclass(frozen=True)
class Written(StorageInfo):
    """Where a row has been written, and what the coordinator needs to know of it besides."""

    data: TensorWriteData | None = None  # of a tensor
    file: str | None = None  # the file's name while the save runs, if it is to have another one then


class DCPWriter(InFolder, RowWriter):
    """Writes checkpoints for `torch.distributed.checkpoint.load`.

    Args:
        path: The folder, or its URL. `save(checkpoint_id=...)` replaces it.
        sync_files: Wait until everything is on the disk.
        overwrite: Whether an existing checkpoint may be replaced.
    """

    def __init__(self, path: str | os.PathLike[str] | Store, sync_files: bool = True, overwrite: bool = True) -> None:
        self._sync_files = sync_files
        self.overwrite = overwrite
        self._name = ""  # the prefix of this rank's files
        self._root = METADATA
        self._replaced: set[str] = set()  # the files of the old checkpoint, and its seal
        import_all()  # `check_is_found` needs them
        if isinstance(path, Store):
            self.path, self.store = path.location, path
        else:
            self._check_id(path)
        self._commit = Commit(self.store, self._root)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._commit.release()
        self._check_id(checkpoint_id)
        self._commit = Commit(self.store, self._root)
        self._name = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.store.prepare()
        if not is_coordinator:
            return
        check_is_found(Place(self.store), "dcp")
        # First, so that this save fails if another one commits from now on.
        self._commit = Commit(self.store, self._root)
        data = self._commit.begin(overwrite=self.overwrite)
        self._replaced = set() if data is None else {SEAL, *(_files_of(data, str(self.path)) or ())}
        self._remove_leftovers(self.store.list())
        self.save_id = uuid.uuid4().hex[:12]
        self._commit.hold(self.save_id)

    def write(self, rows: Sequence[Row], arranged: bytes, rank: int) -> list[WriteResult]:
        self._name = f"__{rank}_{arranged.decode()}"
        files = self._in_files(rows)
        ends = [SUFFIX] if len(files) == 1 else [f"_{number}{SUFFIX}" for number in range(len(files))]
        return self._write_files({f"{self._name}{end}": part for end, part in zip(ends, files, strict=True)})

    def _in_files(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The rows in the files that they go to: one, or several if files should be small."""
        most, files = self.store.caps.file_bytes, list[list[Row]]()
        position = 0
        for row in rows:
            if not files or (most is not None and position >= most):
                files.append([])
                position = 0
            files[-1].append(row)
            position += row.form.nbytes
        return files

    def _write_files(self, files: Mapping[str, Sequence[Row]], threads: int = 1) -> list[WriteResult]:
        """Write data files; if one fails, none of them stays."""
        try:
            parts = results_of([partial(self._write_file, *file) for file in files.items()], threads, "terrazzo-write")
        except BaseException:
            self._remove_own()
            raise
        return [result for part in parts for result in part]

    def _write_file(self, name: str, rows: Sequence[Row]) -> list[WriteResult]:
        results: list[WriteResult] = []
        described: dict[int, TensorWriteData] = {}
        position = 0
        with self.store.upload(name, 0) if self.store.caps.in_place else self.store.stream(name) as file:
            for row in rows:
                end = _write_row(file, position, row)
                item = item_of(row, described)
                where = Written(name, position, end - position, data=item.tensor_data)
                results.append(WriteResult(item.index, end - position, where))
                position = end
        return results

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        self._describe(metadata, results)
        self._put(metadata)
        self._commit.release()
        self.store.delete(self._replaced - files_named(metadata))
        check_is_found(Place(self.store), "dcp")  # even between the two

    def _describe(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        """Complete the metadata by what has been written, and where."""
        if not metadata.state_dict_metadata:  # else a planner has made it
            metadata.state_dict_metadata = merged_entries(
                [(result.index.fqn, result.storage_data.data) for result in part] for part in results
            )
        metadata.storage_data = {each.index: _location(each.storage_data) for part in results for each in part}
        metadata.storage_meta = self.storage_meta()
        metadata.version = dcp_metadata.VERSION

    def _put(self, metadata: Metadata) -> None:
        """Commit the checkpoint of these metadata."""
        listed = self.store.list()
        self._commit.check_alive(files_named(metadata), listed)
        check_is_found(Place(self.store), "dcp")  # once more: a save in another format may have committed
        self._commit.put(dcp_metadata.encode(metadata))
        self._commit.check_committed()
        self._remove_leftovers(listed, files_named(metadata) | self._replaced)

    def _remove_leftovers(self, listed: Sequence[Entry], named: Collection[str] = ()) -> None:
        """Remove the files of saves that ended without a commit; not those of saves in other formats."""
        ours = {
            save_id: entries
            for save_id, entries in by_save(listed, lambda name: save_of_file(name) or save_of(name)).items()
            if all(entry.key == lease_name(save_id) or _NAME.fullmatch(entry.key) for entry in entries)
        }

        def used(data: bytes | bytearray | None) -> set[str] | None:
            needed: set[str] = set()
            for name in {self._root, *_roots([entry.key for entry in self.store.list()])}:
                with suppress(FileNotFoundError):
                    found = data if name == self._root else self.store.get(name)[0]
                    files = set() if found is None else _files_of(found, self.store.location)
                    if files is None:
                        return None
                    needed |= files
            return needed

        self._commit.sweep(listed, ours, used, named=named)

    def abandon(self) -> None:
        self._remove_own()
        self._commit.release()

    def may_abandon(self) -> bool:
        return self._commit.is_absent()

    def _remove_own(self) -> None:
        if self._name:
            names = [entry.key for entry in self.store.list(self._name) if entry.key.endswith(SUFFIX)]
            self.store.delete([name for name in names if name.removeprefix(self._name)[0] in "._"])

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(str(self.path), self._name)


_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes})


def _write_row(file: Upload, position: int, row: Row) -> int:
    """Write a tensor as `torch.save` does, or the bytes of another value; returns the position after it."""
    if row.kind == TENSOR:
        return write_archive(file, position, row.tensor().detach())
    content = row.value.getbuffer() if isinstance(row.value, ObjectBytes) else memoryview(row.value)
    if isinstance(row.value, ObjectBytes) and type(row.value.value) not in _ATOMS:
        _check_is_read(row.name, content, row.value)
    file.write(position, [content])
    return position + len(content)


def _check_is_read(name: str, content: memoryview, value: ObjectBytes) -> None:
    """Raise if a value that is no pickle in terrazzo's own format could not be loaded again in this one."""
    store = MemoryStore()
    store.put("value", content)
    try:
        open_archive(Window(store, file_at(store, "value")))
    except UnsafePickleError as error:
        try:
            decode(value.encoded())
        except UnsupportedValueError:
            return  # the planner has pickled it, which somebody allows
        kind = type(value.value).__qualname__
        raise UnsupportedValueError(
            f"{name}: in PyTorch's format this {kind} would be a pickle that is not known to be plain data, and could "
            "not be loaded again; store its plain parts, or save in terrazzo's own format"
        ) from error


def _location(where: Any) -> StorageInfo:
    """Where a row lies, also from a record of PyTorch's."""
    return StorageInfo(where.relative_path, where.offset, where.length, where.transform_descriptors)


def save_of_file(name: str) -> str | None:
    """The id of the save that wrote a data file; None if no `DCPWriter` did.

    >>> save_of_file("__0_0123456789ab.distcp"), save_of_file("__0_0.distcp")
    ('0123456789ab', None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else match["save"]


def _files_of(data: bytes | bytearray, where: str) -> set[str] | None:
    """The data files of a checkpoint; None if its metadata cannot be read."""
    try:
        return files_named(dcp_metadata.parse(data, f"{where}/{METADATA}"))
    except (CheckpointCorruptError, CheckpointFormatError):
        return None


def files_named(metadata: Metadata) -> set[str]:
    """The data files of the checkpoint of these metadata."""
    return {location.relative_path for location in metadata.storage_data.values()}
