"""Read torch DCP checkpoints: only the needed bytes, directly into the tensors."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

from terrazzo.checkpoint.formats import dcp_metadata
from terrazzo.checkpoint.formats.dcp_metadata import METADATA, Location
from terrazzo.checkpoint.formats.safetensors_header import Header, read_header
from terrazzo.checkpoint.formats.strided import Strided, read_box
from terrazzo.checkpoint.formats.torch_archive import Archive, StoredTensor, is_archive, open_archive
from terrazzo.checkpoint.formats.zip_reading import Window
from terrazzo.checkpoint.metadata import Metadata, TensorStorageMetadata
from terrazzo.checkpoint.native.items import target_of
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.plain_reader import PlainReader
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from terrazzo.checkpoint.stores import Place, ReadFile, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import Box


class DCPReader(PlainReader):
    """Reads checkpoints of `torch.distributed.checkpoint.save`.

    No code in the checkpoint is run: its pickles are read as plain data, and a pickle that refers to anything else
    raises `UnsafePickleError`.

    Args:
        path: The folder, or its URL. `load(checkpoint_id=...)` replaces it.
    """

    plans_alone = True

    def __init__(self, path: str | os.PathLike[str] | Place) -> None:
        self.place = path if isinstance(path, Place) else Place(path)
        self.bytes_read = 0
        self._locations: dict[Any, Location] = {}
        self._entries: Mapping[str, Any] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.place.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._locations = {}
        self.bytes_read = 0
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def read_metadata(self) -> Metadata:
        store = self.place.store
        present = {entry.key for entry in store.list()}
        if METADATA in present:
            names = [METADATA]
        else:
            names = sorted(name for name in present if name.startswith("__") and name.endswith(METADATA))
        if not names:
            raise CheckpointNotFoundError(f"there is no torch DCP checkpoint at {self.place} (no {METADATA})")
        metadata = dcp_metadata.merged([self._parse(store, name) for name in names])
        self._locations, self._entries = metadata.storage_data, metadata.state_dict_metadata
        return metadata

    def _parse(self, store: Store, name: str) -> Metadata:
        return dcp_metadata.parse(store.get(name)[0], f"{self.place}/{name}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self._locations, self._entries = metadata.storage_data, metadata.state_dict_metadata

    def _carry_out(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[Location, ReadItem]]] = {}
        for item in plan.items:
            location = self._locations.get(item.storage_index)
            if location is None:
                raise CheckpointCorruptError(f"{self.place}: the metadata have no position for {item.storage_index}")
            by_file.setdefault(location.file, []).append((location, item))
        store = self.place.store
        for name, items in by_file.items():
            try:
                file = store.open(name)
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"{self.place}: the data file {name} is missing") from error
            try:
                reading = _FileReading(file, f"{self.place}/{name}", self._entries)
                for location, item in sorted(items, key=lambda pair: pair[0].offset):
                    self.bytes_read += reading.read(location, item, planner)
            finally:
                file.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Place(checkpoint_id) / METADATA).is_file()


class _FileReading:
    """One open data file, and the archives and headers in it that have been read."""

    def __init__(self, file: ReadFile, where: str, entries: Mapping[str, Any]) -> None:
        self._file = file
        self._entries = entries
        self._where = where
        self._opened: tuple[Location, Archive | Header] | None = None

    def read(self, location: Location, item: ReadItem, planner: LoadPlanner) -> int:
        """Read an item for the planner; returns the number of bytes."""
        if location.transforms:
            raise CheckpointFormatError(
                f"{self._where}: {item.storage_index.fqn} is stored through the stream extensions "
                f"{', '.join(location.transforms)}, which cannot be read: save it without extensions"
            )
        if item.type is LoadItemType.BYTE_IO:
            window = Window(self._file, location.offset, location.length, f"{self._where}, {item.storage_index.fqn}")
            if is_archive(window):
                planner.load_bytes(item, ObjectBytes(open_archive(window).materialised()))
            else:  # bytes that a custom planner encoded
                planner.load_bytes(item, io.BytesIO(window.read(0, window.length)))
            return location.length
        target = target_of(planner, item)
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.lengths:
            raise CheckpointFormatError(
                f"{item.storage_index.fqn}: the planner returned a tensor of shape {tuple(target.shape)} "
                f"for a box of shape {box.lengths}"
            )
        opened = self._open(location, item)
        if isinstance(opened, Header):
            laid_out = self._in_header(opened, item, box)
            itemsize = laid_out.dtype.itemsize
            read_box(opened.window, laid_out, box, target)
        else:
            self._check(opened.value, item, box)
            itemsize = opened.value.dtype.itemsize
            opened.read_box(opened.value, box, target)
        planner.commit_tensor(item, target)
        return box.numel * itemsize

    def _open(self, location: Location, item: ReadItem) -> Archive | Header:
        if self._opened is not None and self._opened[0] == location:
            return self._opened[1]
        where = f"{self._where}, {item.storage_index.fqn}"
        window = Window(self._file, location.offset, location.length, where)
        if is_archive(window):
            opened: Archive | Header = open_archive(window)
        else:
            # For files of safetensors, PyTorch gives the offset of the whole data for every tensor.
            opened = read_header(Window(self._file, location.offset, self._file.size - location.offset, where))
        self._opened = (location, opened)
        return opened

    def _in_header(self, header: Header, item: ReadItem, box: Box) -> Strided:
        stored = header.tensors.get(item.storage_index.fqn)
        if stored is None:
            raise CheckpointCorruptError(f"{self._where} does not have the tensor {item.storage_index.fqn!r}")
        self._check(stored, item, box)
        return stored

    def _check(self, stored: Any, item: ReadItem, box: Box) -> None:
        if not isinstance(stored, (StoredTensor, Strided)):
            raise CheckpointCorruptError(f"{self._where}: {item.storage_index.fqn} is a value, not a tensor")
        # A file of another rank, or of another checkpoint, may have another tensor of the same name.
        index, entry = item.storage_index, self._entries.get(item.storage_index.fqn)
        fits = len(stored.shape) == box.ndim and Box.whole(stored.shape).contains(box)
        if fits and isinstance(entry, TensorStorageMetadata):
            sizes = [tuple(chunk.sizes) for chunk in entry.chunks if index.offset in (None, chunk.offsets)]
            fits = tuple(stored.shape) in sizes and stored.dtype == entry.properties.dtype
        if not fits:
            raise CheckpointCorruptError(
                f"{self._where}: {index.fqn} is {stored.dtype} of the shape {tuple(stored.shape)}, unlike in the "
                "metadata"
            )
