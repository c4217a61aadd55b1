"""Functions for custom planners."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.chunks import complete_parts
from terrazzo.checkpoint.planner import ReadItem
from terrazzo.checkpoint.torch_api.items import items_of

__all__ = ["create_read_items_for_chunk_list"]


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """The items that fill these chunks of the tensor `fqn` from its stored chunks, which may be different.

    >>> import torch
    >>> from terrazzo.checkpoint.metadata import TensorProperties
    >>> def chunk(start, length):
    ...     return ChunkStorageMetadata(torch.Size([start]), torch.Size([length]))
    >>> stored = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk(0, 2), chunk(2, 2)])
    >>> [tuple(item.storage_index.offset) for item in create_read_items_for_chunk_list("w", stored, [chunk(1, 2)])]
    [(0,), (2,)]
    """
    return [
        item
        for number, chunk in enumerate(local_chunks)
        for item in items_of(
            MetadataIndex(fqn, chunk.offsets, number), fqn, complete_parts(fqn, checkpoint_md.chunks, chunk.box)
        )
    ]
