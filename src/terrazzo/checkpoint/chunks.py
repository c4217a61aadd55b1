"""Lists of chunks, and which of them a box needs.

A table of contents may list thousands of chunks per tensor; a `ChunkTable` keeps them as an array, so that finding the
few that overlap a box is array arithmetic, and makes chunk objects only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import numpy as np
import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata
from terrazzo.layout.box import Box

_FEW: Final = 16  # below this, plain Python is faster than arrays


class ChunkTable(Sequence[ChunkStorageMetadata]):
    """Chunks as an array of shape (chunks, 2, dims): offsets and lengths."""

    __slots__ = ("_boxes",)

    def __init__(self, boxes: np.ndarray[Any, Any]) -> None:
        self._boxes = boxes

    def __len__(self) -> int:
        return len(self._boxes)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        offsets, lengths = self._boxes[index].tolist()
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, lengths in self._boxes.tolist():
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __repr__(self) -> str:
        return f"ChunkTable({list(self)})"

    def identity(self) -> bytes:
        """Equal for tables of equal chunks."""
        return self._boxes.tobytes()

    def near(self, box: Box) -> list[tuple[int, Box]]:
        """Chunks that may overlap the box, with their numbers."""
        numbers: Sequence[int] = range(len(self))
        boxes = self._boxes
        if len(self) >= _FEW:
            offsets = boxes[:, 0].astype(np.int64)
            inside = (offsets < np.array(box.ends)) & (offsets + boxes[:, 1] > np.array(box.offsets))
            chosen = np.nonzero(inside.all(axis=1))[0]
            numbers, boxes = chosen.tolist(), boxes[chosen]
        return [
            (number, Box(tuple(offsets), tuple(lengths)))
            for number, (offsets, lengths) in zip(numbers, boxes.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a stored chunk and a box have in common."""

    number: int  # of the chunk
    chunk_offsets: torch.Size
    in_chunk: torch.Size  # where the common part begins, relative to the chunk
    in_box: torch.Size  # and relative to the box
    lengths: torch.Size


@dataclass(frozen=True, slots=True)
class Coverage:
    """What stored chunks have of a box, and how many of its elements none of them has."""

    parts: list[Overlap]
    missing: int


class Overlaps:
    """Finds overlaps, and remembers them: in a model many tensors have the same shape and are cut the same way."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, Box], Coverage] = {}

    def of(self, chunks: Sequence[ChunkStorageMetadata], box: Box) -> Coverage:
        """The chunks that share elements with `box`, and what they share."""
        if not isinstance(chunks, ChunkTable):
            return _overlaps([(number, _box(chunk)) for number, chunk in enumerate(chunks)], box)
        key = (chunks.identity(), box)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _overlaps(chunks.near(box), box)
        return found


def _box(chunk: Any) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))  # of PyTorch's class, too


def _overlaps(chunks: list[tuple[int, Box]], box: Box) -> Coverage:
    found = []
    missing = box.numel
    for number, chunk in chunks:
        common = chunk.intersect(box)
        if common is not None:
            missing -= common.numel
            found.append(
                Overlap(
                    number,
                    torch.Size(chunk.offsets),
                    torch.Size(common.relative_to(chunk).offsets),
                    torch.Size(common.relative_to(box).offsets),
                    torch.Size(common.lengths),
                )
            )
    return Coverage(found, missing)
