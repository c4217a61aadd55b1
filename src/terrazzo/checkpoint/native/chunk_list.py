"""A table of chunks as the list that PyTorch's `TensorStorageMetadata` has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from terrazzo.checkpoint.native.chunks import Chunks
from terrazzo.layout.box import Box
from terrazzo.layout.chunk import ChunkStorageMetadata


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

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
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


def table_of(chunks: Sequence[Any]) -> Chunks | Sequence[Any]:
    """The table behind a list of chunks; the list itself if there is none."""
    return chunks.table if isinstance(chunks, ChunkList) else chunks


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
