"""The metadata of a checkpoint: its contents, without the data.

Planners, readers and writers exchange these types. Names and fields are those of
`torch.distributed.checkpoint.metadata`, so that planners and storage written for PyTorch work here. PyTorch's code is
not used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch

from terrazzo.layout.chunk import ChunkStorageMetadata

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]

STATE_DICT_TYPE: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class TensorProperties:
    """A tensor's properties apart from its shape. Checkpoints use only `dtype`."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of a tensor. `pin_memory` is not looked up, because that takes a call of the driver."""
        return TensorProperties(dtype=tensor.dtype, layout=tensor.layout, requires_grad=tensor.requires_grad)


@dataclass(slots=True)
class TensorStorageMetadata:
    """A tensor in a checkpoint: its global shape and the chunks that cover it."""

    properties: TensorProperties
    size: torch.Size
    chunks: Sequence[ChunkStorageMetadata]


@dataclass(slots=True)
class BytesStorageMetadata:
    """A value in a checkpoint that is not a tensor."""


STORAGE_TYPES: TypeAlias = TensorStorageMetadata | BytesStorageMetadata


def is_tensor_entry(entry: Any) -> TypeGuard[TensorStorageMetadata]:
    """Whether an entry of the metadata is a tensor's. Readers built on PyTorch's classes return PyTorch's entries."""
    return isinstance(entry, TensorStorageMetadata) or hasattr(entry, "chunks")


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A plain tensor that has parts of a global one, said by its attributes: PyTorch's protocol, since 2.14.

    Attributes:
        global_shape: The shape of the global tensor.
        global_offsets: For each part, where it begins in the global tensor.
        local_offsets: For each part, where it begins in this tensor; () if it is all of it.
        local_sizes: The shape of each part.

    >>> rows = torch.ones(2, 3)
    >>> rows.global_shape, rows.global_offsets = (4, 3), ((2, 0),)
    >>> rows.local_offsets, rows.local_sizes = ((),), ((2, 3),)
    >>> isinstance(rows, CheckpointableTensor), isinstance(torch.ones(2), CheckpointableTensor)
    (True, False)
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class StorageMeta:
    """Information from the storage for planners."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(repr=False)
class Metadata:
    """The metadata of a checkpoint.

    `state_dict_metadata` maps each name to its entry. Treat it as read-only: for a large checkpoint it may be a mapping
    that creates its entries when they are looked up.
    """

    state_dict_metadata: Mapping[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None

    def __repr__(self) -> str:
        place = None if self.storage_meta is None else self.storage_meta.checkpoint_id
        return f"<Metadata of {len(self.state_dict_metadata):,} values{'' if place is None else f' at {place}'}>"


@dataclass(frozen=True, slots=True, init=False)
class MetadataIndex:
    """The name of one stored item: a key of the state dict and, for tensors, the offsets of a chunk.

    `index` is a hint: the chunk's position in the metadata. It is ignored in comparisons.

    >>> MetadataIndex("weight", (2, 0)) == MetadataIndex("weight", torch.Size([2, 0]), index=3)
    True
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "fqn", fqn)
        if offset is not None and type(offset) is not torch.Size:
            offset = torch.Size(offset)
        set_field(self, "offset", offset)
        set_field(self, "index", index)
