"""The format of `torch.distributed.checkpoint`, as one of the formats."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.checkpoint.formats import dcp_metadata
from terrazzo.checkpoint.formats.checking import Value, check_file
from terrazzo.checkpoint.formats.copying import copy_checkpoint
from terrazzo.checkpoint.formats.dcp_metadata import METADATA, Location
from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.safetensors_header import Header, read_header
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.table import StoredBox, TableReader
from terrazzo.checkpoint.formats.torch_archive import StoredTensor, is_archive, open_archive
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.dtypes import dtype_name
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError


class DCPReader(TableReader):
    """Reads checkpoints of `torch.distributed.checkpoint.save`.

    No code in the checkpoint is run: its pickles are read as plain data, and a pickle that refers to anything else
    raises `UnsafePickleError`.

    Args:
        path: The folder, or its URL. `load(checkpoint_id=...)` replaces it.
    """

    def _described(self) -> Metadata:
        store = self.place.store
        present = self.files_at(store)
        if METADATA in present:
            names = [METADATA]
        else:
            names = sorted(name for name in present if name.startswith("__") and name.endswith(METADATA))
        if not names:
            raise CheckpointNotFoundError(f"there is no torch DCP checkpoint at {self.place} (no {METADATA})")
        parts = [dcp_metadata.parse(store.get(name)[0], f"{self.place}/{name}") for name in names]
        return dcp_metadata.merged(parts)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if metadata is not self._metadata:
            self._forget()
            self._metadata = metadata
        super().set_up_storage_reader(metadata, is_coordinator)

    def _forget(self) -> None:
        super()._forget()
        self._chunks: dict[MetadataIndex, StoredChunk] = {}
        self._headers: dict[Location, Header] = {}

    def rows_of(self, name: str) -> list[StoredBox]:
        entry = self.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        locate, store = self._locate, self.place.store
        return [StoredBox(chunk.box, store, partial(locate, name, entry, chunk)) for chunk in entry.chunks]

    def value(self, name: str) -> Any:
        location = self._location(MetadataIndex(name))
        window = self._window(location, name)
        if is_archive(window):
            return open_archive(window).materialised()
        return io.BytesIO(window.read(0, window.length))  # bytes that a custom planner encoded

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Place(checkpoint_id) / METADATA).is_file()

    # ------------------------------------------------- where things lie

    def _location(self, index: MetadataIndex) -> Location:
        location: Location | None = self.read_metadata().storage_data.get(index)
        if location is None:
            raise CheckpointCorruptError(f"{self.place}: the metadata have no position for {index}")
        if location.transforms:
            raise CheckpointFormatError(
                f"{self.place}/{location.file}: {index.fqn} is stored through the stream extensions "
                f"{', '.join(location.transforms)}, which cannot be read: save it without extensions"
            )
        return location

    def _window(self, location: Location, what: str, *, to_end: bool = False) -> Window:
        store = self.place.store
        length = None if to_end else location.length
        return Window(store, self.file_at(store, location.file), location.offset, length, what)

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

    def _looked_up(self, name: str, location: Location) -> StoredChunk:
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
            raise CheckpointCorruptError(f"{self.place}/{location.file} does not have the tensor {name!r}")
        return found


class DCP(Format):
    """A folder with a `.metadata`, or with one of each rank."""

    name = "dcp"

    def find(self, found: Found) -> Place | None:
        of_ranks = (name for name in found.names if name.startswith("__") and name.endswith(METADATA))
        return found.place if METADATA in found.names or any(of_ranks) else None

    def reader(self, place: Place) -> StorageReader:
        return DCPReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked, metadata = Checked(), DCPReader(place).read_metadata()
        begun: set[tuple[str, int]] = set()  # all tensors of a safetensors file have the position of the file's data
        for index, at in sorted(metadata.storage_data.items(), key=lambda pair: (pair[1].file, pair[1].offset)):
            if (at.file, at.offset) not in begun:
                begun.add((at.file, at.offset))
                is_tensor = isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
                value = Value(index.fqn, at.offset, at.length, is_tensor)
                check_file(checked, place.store, at.file, progress, value)
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        writer = DCPWriter(target.store, overwrite=how.overwrite)
        copy_checkpoint(Source(reader), writer, replace(how, allow_pickle=True))  # it stores all values so
