"""A root as the `Metadata` that planners read, its entries and their chunks made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native import objects
from terrazzo.checkpoint.native.chunks import Chunks
from terrazzo.checkpoint.native.containers import Paths
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST, VERSION
from terrazzo.checkpoint.native.root import TENSOR, Root
from terrazzo.checkpoint.native.tensors import dtype_from_name
from terrazzo.checkpoint.stores.base import Store
from terrazzo.layout.box import Box
from terrazzo.layout.chunk import ChunkStorageMetadata


class ManifestEntries(Mapping[str, STORAGE_TYPES]):
    """What is stored under each name. Tensors of the same dtype, shape and layout share one entry: a model has many."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._alike: dict[tuple[str, tuple[int, ...], int], TensorStorageMetadata] = {}

    def __getitem__(self, name: str) -> STORAGE_TYPES:
        root = self._root
        if root.names[name] != TENSOR:
            return BytesStorageMetadata()
        tensor = root.tensors[name]
        key = (tensor.dtype, tensor.shape, tensor.layout)
        entry = self._alike.get(key)
        if entry is None:
            properties, chunks = TensorProperties(dtype_from_name(tensor.dtype)), ChunkList(root.chunks(tensor))
            entry = self._alike[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return entry

    def __reduce__(self) -> tuple[Any, ...]:
        return ManifestEntries, (self._root,)

    def __contains__(self, name: object) -> bool:
        return name in self._root.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._root.names)

    def __len__(self) -> int:
        return len(self._root.names)


@dataclass(frozen=True)
class StorageInfo:
    """Where a value is stored, as PyTorch says it: bytes of a file in the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


class StoredPlaces(Mapping[MetadataIndex, StorageInfo]):
    """Where each chunk and each value of a checkpoint lies; the indexes are read when this is first asked for.

    A chunk that is stored in pieces has one entry for each piece. `root` is the checkpoint's root.
    """

    def __init__(self, root: Root, store: Store) -> None:
        self.root = root
        self._store = store

    @cached_property
    def _places(self) -> dict[MetadataIndex, StorageInfo]:
        root = self.root
        boxes = ((name, box) for name in root.tensors for box in root.chunks(root.tensors[name]).boxes())
        found: dict[MetadataIndex, StorageInfo] = {}
        for (name, box), chunk in PartIndexes(root, self._store).by_box(boxes).items():
            is_tensor = root.tensors[name].kind == TENSOR
            index = MetadataIndex(name, box.offsets) if is_tensor else MetadataIndex(name)
            stored = chunk.nbytes if not chunk.codec else int(chunk.frames[chunk.first_frame :][: chunk.blocks].sum())
            found[index] = StorageInfo(chunk.file.name, chunk.start, stored)
        for value in root.head.objects:
            found[MetadataIndex(value.name)] = StorageInfo(MANIFEST, 0, len(root.data))
        return found

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        return self._places[index]

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredPlaces, (self.root, self._store)


def metadata_of(manifest: Root, store: Store, meta: StorageMeta | None = None) -> Metadata:
    """The table of contents of a checkpoint in the native format."""
    data, paths = manifest.head.planner_data, Paths(manifest.head.paths, dict(manifest.head.forms))
    return Metadata(
        ManifestEntries(manifest),
        planner_data=(paths if paths or paths.forms else None) if data is None else objects.decode(data),
        storage_data=StoredPlaces(manifest, store),
        storage_meta=meta,
        version=str(VERSION),
    )


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of a table, made when they are asked for.

    >>> from terrazzo.checkpoint.native.chunks import GridChunks
    >>> [tuple(chunk.offsets) for chunk in ChunkList(GridChunks((4, 3), (2, 2)))]
    [(0, 0), (0, 2), (2, 0), (2, 2)]
    """

    __slots__ = ("table",)

    def __init__(self, table: Chunks) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError("chunk index out of range")
        return _chunk(self.table.box(index % len(self)))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return map(_chunk, self.table.boxes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __repr__(self) -> str:
        return f"ChunkList({self.table!r})"


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
