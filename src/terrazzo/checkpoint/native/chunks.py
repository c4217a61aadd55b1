"""Lists of chunks, and which of them a box needs.

A table of contents may list thousands of chunks per tensor; a `ChunkTable` keeps them as an array, so that finding the
few that overlap a box is array arithmetic, and makes chunk objects only when they are asked for.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Final, overload

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata
from terrazzo.layout.box import Box

_FEW: Final = 16  # below this, plain Python is faster than arrays


class Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor, which are made when they are asked for."""

    __slots__ = ()

    @abc.abstractmethod
    def box(self, number: int) -> Box:
        """Where chunk `number` is in the tensor."""

    @abc.abstractmethod
    def identity(self) -> Hashable:
        """Equal for tables of equal chunks."""

    @abc.abstractmethod
    def near(self, box: Box) -> list[tuple[int, Box]]:
        """Chunks that may overlap the box, with their numbers."""

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError("chunk index out of range")
        box = self.box(index % len(self))
        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list's


class ChunkTable(Chunks):
    """Chunks as an array of shape (chunks, 2, dims): offsets and lengths."""

    __slots__ = ("_boxes",)

    def __init__(self, boxes: np.ndarray[Any, Any]) -> None:
        self._boxes = boxes

    def __len__(self) -> int:
        return len(self._boxes)

    def box(self, number: int) -> Box:
        offsets, lengths = self._boxes[number].tolist()
        return Box(tuple(offsets), tuple(lengths))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, lengths in self._boxes.tolist():
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))

    def __repr__(self) -> str:
        return f"ChunkTable({list(self)})"

    def identity(self) -> Hashable:
        return self._boxes.tobytes()

    def near(self, box: Box) -> list[tuple[int, Box]]:
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


class GridChunks(Chunks):
    """The chunks of a tensor that is cut in every dim at multiples of a step, in row-major order: computed, not listed.

    >>> [tuple(chunk.offsets) for chunk in GridChunks((4, 3), (2, 2))]
    [(0, 0), (0, 2), (2, 0), (2, 2)]
    """

    __slots__ = ("shape", "steps", "_counts")

    def __init__(self, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.shape = shape
        self.steps = steps
        self._counts = tuple([-(-size // step) or 1 for size, step in zip(shape, steps, strict=True)])

    def __len__(self) -> int:
        return prod(self._counts)

    def box(self, number: int) -> Box:
        offsets = []
        for count, step in zip(reversed(self._counts), reversed(self.steps), strict=True):
            number, position = divmod(number, count)
            offsets.append(position * step)
        offsets.reverse()
        lengths = [min(step, size - at) for step, size, at in zip(self.steps, self.shape, offsets, strict=True)]
        return Box(tuple(offsets), tuple(lengths))

    def number_at(self, offsets: Sequence[int]) -> int:
        """The number of the chunk that begins there; -1 if there is none."""
        number = 0
        for count, step, at in zip(self._counts, self.steps, offsets, strict=True):
            position, rest = divmod(at, step)
            if rest or not 0 <= position < count:
                return -1
            number = number * count + position
        return number

    def number_of(self, box: Box) -> int:
        """The number of the chunk that is exactly this box; -1 if there is none."""
        number = 0
        for at, length, step, size in zip(box.offsets, box.lengths, self.steps, self.shape, strict=True):
            if at % step or at >= size > 0 or length != (step if at + step <= size else size - at):
                return -1
            number = number * (-(-size // step) or 1) + at // step
        return number

    def __repr__(self) -> str:
        return f"GridChunks({self.shape}, {self.steps})"

    def identity(self) -> Hashable:
        return self.shape, self.steps

    def near(self, box: Box) -> list[tuple[int, Box]]:
        ranges = [
            range(start // step, -(-(start + length) // step))
            for start, length, step in zip(box.offsets, box.lengths, self.steps, strict=True)
        ]
        found = []
        for place in product(*ranges):
            number = 0
            for position, count in zip(place, self._counts, strict=True):
                number = number * count + position
            found.append((number, self.box(number)))
        return found


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """What a stored chunk and a box have in common."""

    number: int  # of the chunk
    chunk: Box  # where it is in the tensor
    in_chunk: tuple[int, ...]  # where the common part begins, relative to the chunk
    in_box: tuple[int, ...]  # and relative to the box
    lengths: tuple[int, ...]


class Coverage(msgspec.Struct, frozen=True, gc=False):
    """What stored chunks have of a box, and how many of its elements none of them has."""

    parts: tuple[Overlap, ...]
    missing: int


class Overlaps:
    """Finds overlaps, and remembers them: in a model many tensors have the same shape and are cut the same way."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Box, Coverage]] = {}
        # The same by the table itself, which is faster; the table is kept, so that its number stays its own.
        self._tables: dict[int, tuple[object, dict[Box, Coverage]]] = {}

    def of(self, chunks: Sequence[ChunkStorageMetadata], box: Box) -> Coverage:
        """The chunks that share elements with `box`, and what they share."""
        table = self._tables.get(id(chunks))
        if table is None:
            if not isinstance(chunks, Chunks):
                return _overlaps([(number, _box(chunk)) for number, chunk in enumerate(chunks)], box)
            # Grids that are equal are mostly one object, so what is known of one is not looked for by what it says.
            fresh: dict[Box, Coverage] = {}
            if not isinstance(chunks, GridChunks):
                fresh = self._known.setdefault(chunks.identity(), fresh)
            table = self._tables[id(chunks)] = chunks, fresh
        known = table[1]
        found = known.get(box)
        if found is None:
            number = chunks.number_of(box) if isinstance(chunks, GridChunks) else -1
            found = known[box] = _one_chunk(number, box) if number >= 0 else _overlaps(chunks.near(box), box)  # type: ignore[attr-defined]  # those in `_tables` are `Chunks`
        return found


def _box(chunk: Any) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))  # of PyTorch's class, too


def _one_chunk(number: int, box: Box) -> Coverage:
    """What a chunk has of itself."""
    nowhere = (0,) * len(box.lengths)
    return Coverage((Overlap(number, box, nowhere, nowhere, box.lengths),), 0)


def _overlaps(chunks: list[tuple[int, Box]], box: Box) -> Coverage:
    found = []
    missing = box.numel
    for number, chunk in chunks:
        common = chunk.intersect(box)
        if common is not None:
            missing -= common.numel
            in_chunk, in_box = common.relative_to(chunk).offsets, common.relative_to(box).offsets
            found.append(Overlap(number, chunk, in_chunk, in_box, common.lengths))
    return Coverage(tuple(found), missing)
