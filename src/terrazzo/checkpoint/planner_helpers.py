"""Functions for custom planners."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.overlaps import Overlaps
from terrazzo.checkpoint.plan.load_planner import read_items
from terrazzo.checkpoint.planner import ReadItem

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
    overlaps = Overlaps()
    return [
        item
        for number, chunk in enumerate(local_chunks)
        for item in read_items(MetadataIndex(fqn, chunk.offsets, number), fqn, chunk.box, checkpoint_md, overlaps)
    ]
