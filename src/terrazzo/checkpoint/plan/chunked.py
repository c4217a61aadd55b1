"""A distributed tensor that consists of chunks only.

Checkpoints save and load anything with `__create_chunk_list__`, so other parts of the library can use this class to
save and load boxes of tensors: planning, choosing writers, reading in ranges, filling in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from terrazzo.checkpoint.plan.sharded import Holders
from terrazzo.layout.box import Box


class ChunkedTensor:
    """This rank's boxes of a tensor, and tensors with their elements."""

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
        """The data of the only chunk."""
        ((_, data),) = self._chunks.values()
        return data

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in self._chunks.values()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[tuple(index.offset or ())][1]

    def own_chunks(self) -> Sequence[tuple[Box, torch.Tensor]]:
        """This rank's boxes, and their elements."""
        return list(self._chunks.values())
