"""A distributed tensor made of nothing but chunks.

Checkpoints save and load anything that says which chunks it has (`__create_chunk_list__`), so with this the whole
engine is that of checkpoints: planning, who writes what, reading in ranges, filling in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from terrazzo.checkpoint.plan.sharded import Holders
from terrazzo.layout.box import Box


class ChunkedTensor:
    """What this rank has of a tensor: boxes, and their elements in memory that is somebody else's, or made for it."""

    def __init__(
        self,
        size: torch.Size,
        dtype: torch.dtype,
        chunks: Mapping[tuple[int, ...], tuple[Box, torch.Tensor]],
        holders: Holders | None,
    ) -> None:
        self._size = size
        self.dtype = dtype
        self._chunks = chunks
        self.holders = holders

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self._size

    def to_local(self) -> torch.Tensor:
        """The data, of the only chunk."""
        ((_, data),) = self._chunks.values()
        return data

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in self._chunks.values()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[tuple(index.offset or ())][1]

    @property
    def chunks(self) -> Sequence[tuple[Box, torch.Tensor]]:
        """The boxes that this rank has, and their elements."""
        return list(self._chunks.values())
