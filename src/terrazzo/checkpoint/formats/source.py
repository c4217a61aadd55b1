"""Any checkpoint as a source of single tensors and values, and a planner that copies it to a writer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.checkpoint.native.objects import ObjectBytes, encode
from terrazzo.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.torch_api.readers import Boxes
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box, boxes_of_flat_range

_PIECE: Final = 16 << 20  # bytes in memory at a time while a tensor is copied
_CHUNK: Final = 256 << 20  # larger chunks are copied in parts


class Source:
    """A checkpoint behind a reader.

    Attributes:
        metadata: its metadata.
        paths: the path of each name in the nested state dict.
    """

    def __init__(self, reader: StorageReader) -> None:
        self._boxes = Boxes(reader)
        self.metadata = self._boxes.metadata
        known = self.metadata.planner_data
        self.paths: dict[str, tuple[Any, ...]] = known if isinstance(known, dict) else {}

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fill `target` with a box of a tensor."""
        self._boxes.read([(name, box, target)])

    def whole(self, name: str) -> Any:
        """All of a tensor, or another value."""
        entry = self.metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            found = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            self.read(name, Box.whole(entry.size), found)
            return found
        value = self.value(name)
        if not isinstance(value, ObjectBytes):
            raise UnsupportedValueError(f"{name}: its bytes can be read only by the custom planner that wrote them")
        return value.value

    def pieces(
        self,
        name: str,
        progress: Callable[[str, int], None] | None = None,
        elements: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[memoryview]:
        """A tensor's bytes in row-major order, in pieces; each is valid until the next one is requested.

        Args:
            progress: called for each piece when the next one is requested.
            elements: the first one, and the one after the last; None: all.
            dtype: another dtype to convert them to.
        """
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name} is not a tensor")
        own = entry.properties.dtype
        start, stop = elements or (0, entry.size.numel())
        limit = max(_PIECE // (own.itemsize + (0 if dtype is None or dtype is own else dtype.itemsize)), 1)
        buffer = torch.empty(min(stop - start, limit), dtype=own, device="cpu")
        for box in boxes_of_flat_range(entry.size, start, stop):
            for window in row_major_windows(box.lengths, limit):
                part = buffer[: window.numel]
                self.read(name, window.shifted(box.offsets), part.view(window.lengths))
                yield bytes_of(part if dtype is None else part.to(dtype))
                if progress is not None:
                    progress(name, part.nbytes)

    def value(self, name: str) -> io.BytesIO:
        """A stored value that is not a tensor: an `ObjectBytes`, or bytes that a custom planner encoded."""
        return self._boxes.value(name)


class CopyPlanner(SavePlanner):
    """Saves the contents of a source, chunk by chunk; each is read when the writer needs it."""

    def __init__(self, source: Source, *, allow_pickle: bool = False) -> None:
        self._source = source
        self._allow_pickle = allow_pickle

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, entry in self._source.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            chunks = [part for chunk in entry.chunks for part in _parts(chunk.box, entry.properties.dtype.itemsize)]
            kind = WriteItemType.TENSOR if len(chunks) == 1 else WriteItemType.SHARD
            for number, box in enumerate(chunks):
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
                data = TensorWriteData(chunk, entry.properties, entry.size)
                items.append(WriteItem(MetadataIndex(name, box.offsets, number), kind, data))
        return SavePlan(items, planner_data=self._source.paths or None)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        entries = dict(self._source.metadata.state_dict_metadata)
        for plan in all_plans:
            chunks: dict[str, list[ChunkStorageMetadata]] = {}
            for item in plan.items:
                if item.tensor_data is not None:
                    chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
            for name, parts in chunks.items():
                entry = entries[name]
                assert isinstance(entry, TensorStorageMetadata)
                entries[name] = TensorStorageMetadata(entry.properties, entry.size, parts)
        return all_plans, Metadata(entries, planner_data=self._source.paths or None)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            found = self._source.value(name)
            if not isinstance(found, ObjectBytes):
                return found
            try:
                return ObjectBytes(found.value, encode(found.value, allow_pickle=self._allow_pickle))
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{name}: {error}") from error
        target = torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="cpu")
        self._source.read(name, data.chunk.box, target)
        return target


def _parts(box: Box, itemsize: int) -> list[Box]:
    """A chunk, or its parts, if it is large."""
    if box.numel * itemsize <= _CHUNK:
        return [box]
    return [part.shifted(box.offsets) for part in row_major_windows(box.lengths, _CHUNK // itemsize)]
