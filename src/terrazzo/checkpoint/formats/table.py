"""Readers of checkpoints of other systems: a format says which rows (`stored`) a tensor has (`TableReader.rows_of`)."""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.stored import Asked, StoredBox, read_rows
from terrazzo.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from terrazzo.checkpoint.native.objects import EncodedBytes, ObjectBytes
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.stores import Entry, Place, Store
from terrazzo.checkpoint.torch_api.storages import TargetReader
from terrazzo.errors import CheckpointFormatError, CheckpointNotFoundError, ConflictError
from terrazzo.layout.box import Box

_FEW: Final = 8  # files whose dates are asked for one by one


class BoxReader(TargetReader):
    """A reader that reads one box of a tensor after the other, on each rank what that rank needs.

    Subclasses say what there is (`read_metadata`), and read boxes of tensors (`read_box`) and other values (`value`).

    Args:
        path: Where the checkpoint is; `load(checkpoint_id=...)` names another place.
    """

    def __init__(self, path: str | os.PathLike[str] | Place | Store) -> None:
        self.place = path if isinstance(path, Place) else Place(path)

    @abc.abstractmethod
    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        """Fill `target` with a box of a tensor; returns the bytes that were read.

        `target` has the box's shape; its device and dtype may be others than the stored tensor's. The box lies in one
        of the chunks that the metadata list.
        """

    def value(self, name: str) -> Any:
        """A value that is not a tensor."""
        raise CheckpointFormatError(f"{self.place} has no {name!r} that is not a tensor")

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.place.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def fill(self, targets: Sequence[Target]) -> None:
        for target in targets:
            for part in target.parts:
                box = Box(part.in_chunk, part.lengths).shifted(part.chunk.offsets)
                self.bytes_read += self.read_box(target.source, box, target.part(part))

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        for name in names:
            value = self.value(name)
            yield value if isinstance(value, EncodedBytes) else ObjectBytes(value)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).exists()


def tensor_entry(dtype: torch.dtype, shape: Sequence[int], boxes: Sequence[Box] | None = None) -> TensorStorageMetadata:
    """What metadata say of a tensor that is stored in these boxes, or in one."""
    size = torch.Size(shape)
    boxes = [Box.whole(tuple(size))] if boxes is None else boxes
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


class TableReader(BoxReader):
    """A reader of a checkpoint that can say which bytes of which files a tensor consists of.

    Subclasses have `_described`, which reads the table of contents, `rows_of` and `value`. What is there is looked at
    once, so that a reader sees one checkpoint, and again after a load.
    """

    def __init__(self, path: str | os.PathLike[str] | Place | Store) -> None:
        super().__init__(path)
        self._forget()

    @abc.abstractmethod
    def _described(self) -> Metadata:
        """The table of contents."""

    @abc.abstractmethod
    def rows_of(self, name: str) -> Sequence[StoredBox] | torch.Tensor:
        """The rows of a tensor, or the tensor if it is in memory."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None or self._used:  # another checkpoint may be there by now
            self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._used = False
        self._seen: dict[str, dict[str, Entry]] = {}  # by location: files, as they were before any was read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._described()
        return self._metadata

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        self.read_metadata()
        self._used = True
        return self._read([Asked(name, box, self.rows_of(name))], [target])

    def fill(self, targets: Sequence[Target]) -> None:
        self.read_metadata()
        self._used = True
        parts = [(target, part) for target in targets for part in target.parts]
        rows = {name: self.rows_of(name) for name in dict.fromkeys(target.source for target, _ in parts)}
        tables = [(name, found) for name, found in rows.items() if not isinstance(found, torch.Tensor)]
        by_offsets = {(name, row.box.offsets): row for name, found in tables for row in found if not row.box.is_empty}
        asked = []
        for target, part in parts:  # of the row that has the chunk, if there is one
            box = Box(part.in_chunk, part.lengths).shifted(part.chunk.offsets)
            row = by_offsets.get((target.source, part.chunk.offsets))
            own = [row] if row is not None and row.box.contains(box) else rows[target.source]
            asked.append(Asked(target.source, box, own))
        self.bytes_read += self._read(asked, [target.part(part) for target, part in parts])

    # ------------------------------------------------- files that must not change

    def files_at(self, store: Store) -> dict[str, Entry]:
        """The files of a store, as they were when this was first called."""
        known = self._seen.get(store.location)
        if known is None:
            known = self._seen[store.location] = _files(store, None)
        return known

    def file_at(self, store: Store, key: str) -> FileEntry:
        """A file of the checkpoint, which has to be there."""
        if self.place.is_file():  # in a folder with other files, which may be many
            self._seen.setdefault(store.location, _files(store, [key]))
        known = self.files_at(store)
        if key not in known:  # a reader built on this one may have fetched it since
            known.update(_files(store, [key]))
        entry = known.get(key)
        if entry is None:
            raise CheckpointNotFoundError(f"{store.location}: the file {key} is missing")
        return FileEntry(key, entry.size, 0, 0)

    def _read(self, asked: Sequence[Asked], targets: Sequence[torch.Tensor]) -> int:
        """Fill the targets; raises if a file that was read is no longer the one that was looked into before."""
        read = read_rows(asked, targets)
        for store, names in read.files.items():
            before = self._seen.get(store.location, {})
            now = _files(store, names if len(names) < _FEW else None)
            for name in sorted(names.intersection(before)):
                if now.get(name) != before[name]:
                    raise ConflictError(
                        f"{store.location}/{name} has been replaced while it was read, so what has been loaded may "
                        f"be of two checkpoints. Load again while no job saves there"
                    )
        return read.nbytes


def _files(store: Store, names: Iterable[str] | None) -> dict[str, Entry]:
    """The files of a store that are there, or those of these names."""
    if names is None:
        return {entry.key: entry for entry in store.list()}
    found = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = store.stat(name)
    return found
