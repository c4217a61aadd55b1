"""Lists of chunks, and which of them a box needs.

A table of contents may list thousands of chunks per tensor; a `ChunkTable` keeps them as arrays, so that
finding the few that overlap a box is array arithmetic, and makes chunk objects only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata
from terrazzo.layout.box import Box

_FEW = 16  # below this, plain Python is faster than arrays


class ChunkTable(Sequence[ChunkStorageMetadata]):
    """Chunks as two arrays of shape (chunks, dims)."""

    __slots__ = ("_lengths", "_offsets")

    def __init__(self, offsets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        self._offsets = offsets
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return ChunkStorageMetadata(
            torch.Size(self._offsets[index].tolist()), torch.Size(self._lengths[index].tolist())
        )

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, lengths in zip(self._offsets.tolist(), self._lengths.tolist(), strict=True):
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"ChunkTable({list(self)})"

    def boxes(self) -> list[Box]:
        """The chunks as boxes."""
        pairs = zip(self._offsets.tolist(), self._lengths.tolist(), strict=True)
        return [Box(tuple(offsets), tuple(lengths)) for offsets, lengths in pairs]

    def candidates(self, box: Box) -> list[tuple[int, Box]]:
        """The chunks that overlap the box, with their numbers."""
        ends = np.array(box.ends)
        inside = (self._offsets < ends) & (self._offsets + self._lengths > np.array(box.offsets))
        numbers = np.nonzero(inside.all(axis=1))[0]
        rows = zip(numbers.tolist(), self._offsets[numbers].tolist(), self._lengths[numbers].tolist(), strict=True)
        return [(number, Box(tuple(offsets), tuple(lengths))) for number, offsets, lengths in rows]


def overlapping(chunks: Sequence[ChunkStorageMetadata], box: Box) -> list[tuple[int, Box, Box]]:
    """For each chunk that shares elements with `box`: its number, its box, and what they share."""
    if isinstance(chunks, ChunkTable):
        numbered = list(enumerate(chunks.boxes())) if len(chunks) < _FEW else chunks.candidates(box)
    else:
        numbered = [(number, chunk.box) for number, chunk in enumerate(chunks)]
    found = []
    for number, chunk_box in numbered:
        common = chunk_box.intersect(box)
        if common is not None:
            found.append((number, chunk_box, common))
    return found
