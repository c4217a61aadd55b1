"""Plans of saves and loads, and the interface of planners.

A *save planner* makes a `SavePlan` from a state dict: a list of `WriteItem`s. A storage writer carries it out, and gets
the data of each item from the planner. A *load planner* makes a `LoadPlan` of `ReadItem`s from a state dict and a
checkpoint's `Metadata`, and returns the tensors that a storage reader fills.

Names, fields and the order of calls are those of `torch.distributed.checkpoint.planner`.
"""

from __future__ import annotations

import abc
import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch

from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from terrazzo.layout.drawing import ShownAsCall


class WriteItemType(Enum):
    """The kind of an item to write."""

    TENSOR = 1
    SHARD = 2
    BYTE_IO = 3


class LoadItemType(Enum):
    """The kind of an item to read."""

    TENSOR = 1
    BYTE_IO = 2


@dataclass(frozen=True, slots=True)
class BytesIOWriteData:
    """The size of a value that is not a tensor, if it is known before writing."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """A chunk to write, and the tensor that it is part of."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A chunk or a value that a rank writes."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """The bytes of the chunk that is written; None for what is not a tensor.

        >>> chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
        >>> data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([4, 3]))
        >>> WriteItem(MetadataIndex("w", (0, 0)), WriteItemType.SHARD, tensor_data=data).tensor_storage_size()
        24
        """
        if self.tensor_data is None:
            return None
        return prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box that a rank reads, with its offsets in the stored chunk and in the state dict's chunk.

    `dest_offsets` and `storage_offsets` are relative to the chunks that the two indices name.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """The items that one rank writes. Iterating over a plan yields them."""

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    # False if a rank's plan is the same as for the last save, so that it does not send the items again.
    usable: bool = True

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.items)


@dataclass
class LoadPlan:
    """The items that one rank reads. Iterating over a plan yields them."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self.items)


class SavePlanner(ShownAsCall, abc.ABC):
    """Decides what each rank writes.

    `save` makes these calls, in this order: `set_up_planner` and `create_local_plan` on every rank,
    `create_global_plan` on the coordinator with the plans of all ranks, `finish_plan` on every rank with its part
    of the global plan, then `resolve_data` on every rank, at least once for each item.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state dict and what else the later calls need."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """The items that this rank could write. `planner_data` may have anything that the global step needs."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The final plans of all ranks, from what each could write, and the checkpoint's metadata."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """A last word on this rank's part of the global plan."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of one item, for writing.

        Called from any thread, any number of times, shortly before writing, so conversions that allocate memory should
        be done here. A tensor may be on any device and need not be contiguous.
        """


class LoadPlanner(ShownAsCall, abc.ABC):
    """Decides what each rank reads, and into which tensors.

    `load` makes these calls, in this order: `set_up_planner` and `create_local_plan` on every rank,
    `create_global_plan` on the coordinator, `finish_plan` on every rank, then for each item either `load_bytes`, or
    `resolve_tensor` followed by `commit_tensor`.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state dict, the metadata and what else the later calls need."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """The items that this rank reads."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks, possibly changed. Called on the coordinator."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """A last word on this rank's part of the global plan."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value that is not a tensor in the state dict."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A buffer that a reader fills with the item's bytes, if it can."""
        raise NotImplementedError("LoadPlanner.resolve_bytes is not implemented")

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor that a reader fills with the item's data; if possible a view of the state dict's tensor."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Called when the tensor that `resolve_tensor` returned has been filled."""
