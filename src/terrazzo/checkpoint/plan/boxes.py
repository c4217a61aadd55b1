"""Boxes of tensors and single values of any checkpoint, read through its reader, without a state dict."""

from __future__ import annotations

import io
from collections.abc import Iterable

import torch

from terrazzo.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.overlaps import Overlaps
from terrazzo.checkpoint.plan.load_planner import read_items
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, ReadingPlanner, ReadItem
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.errors import CheckpointCorruptError, UnsupportedValueError
from terrazzo.layout.box import Box

_NONE = torch.Size()


class Boxes:
    """What a reader reads of a checkpoint.

    Attributes:
        metadata: the checkpoint's metadata.
    """

    def __init__(self, reader: StorageReader, *, allow_pickle: bool = False) -> None:
        self._reader = reader
        self._allow_pickle = allow_pickle
        self.metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, True)

    def tensor(self, name: str) -> TensorStorageMetadata:
        """The entry of a tensor."""
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise UnsupportedValueError(f"{name} is not a tensor")
        return entry

    def read(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Fill tensors, each with a box of the tensor of a name; no two boxes of one begin at the same place."""
        targets: dict[MetadataIndex, torch.Tensor] = {}
        items: list[ReadItem] = []
        overlaps = Overlaps()
        for name, box, target in wanted:
            entry = self.tensor(name)
            if not box.is_empty:
                index = MetadataIndex(name, box.offsets)
                targets[index] = target
                items += read_items(index, name, box, entry, overlaps)
        self._fetch(items, _Fetch(targets, self._allow_pickle))

    def value(self, name: str) -> io.BytesIO:
        """A value that is not a tensor: an `ObjectBytes`, or bytes that a custom planner encoded."""
        fetch = _Fetch({}, self._allow_pickle)
        self._fetch(
            [ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), _NONE, MetadataIndex(name), _NONE, _NONE)], fetch
        )
        if fetch.loaded is None:
            raise CheckpointCorruptError(f"{name}: the reader gave no value")
        return fetch.loaded

    def _fetch(self, items: list[ReadItem], planner: _Fetch) -> None:
        self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(items)), planner).wait()


class _Fetch(ReadingPlanner):
    """A planner for tensors, or for one value."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor], allow_pickle: bool) -> None:
        self._targets = targets
        self.allow_pickle = allow_pickle
        self.loaded: io.BytesIO | None = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded = value

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets.get(read_item.dest_index)
        if target is None:
            raise CheckpointCorruptError(f"{read_item.storage_index.fqn} is stored as a tensor, not as a value")
        if target.shape == read_item.lengths:
            return target
        return target[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices()]
