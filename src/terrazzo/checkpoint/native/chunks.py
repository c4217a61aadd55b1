"""The chunks of a stored tensor, and which of them a box needs.

A table of contents may list thousands of chunks per tensor; a `ChunkTable` keeps them as an array, so that finding the
few that overlap a box is array arithmetic, and makes boxes only when they are asked for.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from terrazzo.checkpoint.native.index import Array
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box, make_up

_FEW: Final = 16  # below this, plain Python is faster than arrays


class Chunks(abc.ABC):
    """The chunks of a tensor: boxes, which are made when they are asked for."""

    __slots__ = ()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def box(self, number: int) -> Box:
        """Where chunk `number` is in the tensor."""

    def boxes(self) -> Iterator[Box]:
        """All of them, in order."""
        return map(self.box, range(len(self)))

    @abc.abstractmethod
    def near(self, box: Box) -> list[tuple[int, Box]]:
        """Chunks that may overlap the box, with their numbers."""


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

    def __repr__(self) -> str:
        return f"ChunkTable({list(self.boxes())})"

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

    >>> [box.offsets for box in GridChunks((4, 3), (2, 2)).boxes()]
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

    def number_of(self, box: Box) -> int:
        """The number of the chunk that is exactly this box; -1 if there is none.

        >>> grid = GridChunks((4, 3), (2, 2))
        >>> grid.number_of(Box((2, 2), (2, 1))), grid.number_of(Box((1, 0), (2, 2)))
        (3, -1)
        """
        number = 0
        for at, length, step, size in zip(box.offsets, box.lengths, self.steps, self.shape, strict=True):
            if at % step or at >= size > 0 or length != (step if at + step <= size else size - at):
                return -1
            number = number * (-(-size // step) or 1) + at // step
        return number

    def __repr__(self) -> str:
        return f"GridChunks({self.shape}, {self.steps})"

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

    @property
    def common(self) -> Box:
        """Where the common part is in the tensor."""
        return Box(self.in_chunk, self.lengths).shifted(self.chunk.offsets)


def overlapping(chunks: Chunks | Sequence[Any], box: Box) -> tuple[Overlap, ...]:
    """What a box shares with each chunk that has elements of it: of a table, or of a list of PyTorch's chunks."""
    number = chunks.number_of(box) if isinstance(chunks, GridChunks) else -1
    if number >= 0:
        start = (0,) * len(box.lengths)
        return (Overlap(number, box, start, start, box.lengths),)
    near = chunks.near(box) if isinstance(chunks, Chunks) else [(n, _box(chunk)) for n, chunk in enumerate(chunks)]
    found = []
    for number, chunk in near:
        common = chunk.intersect(box)
        if common is not None:
            in_chunk, in_box = common.relative_to(chunk).offsets, common.relative_to(box).offsets
            found.append(Overlap(number, chunk, in_chunk, in_box, common.lengths))
    return tuple(found)


def complete_parts(source: str, chunks: Chunks | Sequence[Any], box: Box) -> tuple[Overlap, ...]:
    """The parts of chunks that make up a box of the tensor stored as `source`; raises if some of it is missing,
    or there more than once.

    `chunks` may be the list of an entry of the metadata.
    """
    table = getattr(chunks, "table", chunks)
    parts = overlapping(table, box)
    if len(parts) == 1 and parts[0].lengths == box.lengths:  # as mostly
        return parts
    missing = box.numel - sum([prod(part.lengths) for part in parts])
    if missing > 0:
        raise CheckpointError(
            f"{source!r}: {missing} of the {box.numel} elements that are needed are not in the checkpoint, which is "
            f"incomplete"
        )
    if missing or not (isinstance(table, GridChunks) or make_up(box, [part.common for part in parts])):
        raise CheckpointCorruptError(
            f"{source!r}: chunks of the checkpoint overlap, so some elements that are needed are there more than once"
            f"{'' if missing else ', and others not at all'}; save it again"
        )
    return parts


def _box(chunk: Any) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))  # of PyTorch's class, too


def faults_alike(shapes: Array, boxes: Array) -> list[tuple[int, str]]:
    """The rows of the tensors whose chunks do not cover them exactly, and what is wrong with each.

    All have equally many chunks: `boxes` are (tensors, chunks, 2, dims), offsets and lengths. Empty chunks are only
    those of empty tensors.
    """
    offsets, lengths = boxes[:, :, 0], boxes[:, :, 1]
    whole = shapes.prod(axis=1)
    written = lengths.prod(axis=2).sum(axis=1)
    outside = ((offsets < 0) | (offsets > shapes[:, None] - lengths)).any(axis=(1, 2))
    faults = [
        (row, f"a chunk reaches beyond the shape {shapes[row].tolist()}") for row in np.nonzero(outside)[0].tolist()
    ]
    faults += [
        (row, f"{whole[row] - written[row]} of {whole[row]} elements were not written")
        for row in np.nonzero(~outside & (written < whole))[0].tolist()
    ]
    twice = ~outside & (written > whole)
    if offsets.shape[1] > 1:
        exact = np.nonzero(~outside & (written == whole))[0]
        twice[exact] = _overlaps(shapes[exact], offsets[exact], lengths[exact])
    return faults + [(row, "some elements were written more than once") for row in np.nonzero(twice)[0].tolist()]


def _overlaps(shapes: Array, offsets: Array, lengths: Array) -> Array:
    """For tensors whose chunks have the right volume together: whether some overlap (and so leave a gap elsewhere)."""
    grid = np.ones(len(shapes), dtype=bool)
    place = np.zeros(offsets.shape[:2], dtype=np.int64)  # of a chunk's first element in the flattened tensor
    for dim in range(shapes.shape[1]):
        # A grid: in every dim, all chunks are cut at the same places.
        order = np.argsort(offsets[:, :, dim], axis=1, kind="stable")
        starts = np.take_along_axis(offsets[:, :, dim], order, axis=1)
        steps = np.take_along_axis(lengths[:, :, dim], order, axis=1)
        same = (starts[:, 1:] == starts[:, :-1]) & (steps[:, 1:] == steps[:, :-1])
        following = starts[:, 1:] == starts[:, :-1] + steps[:, :-1]
        grid &= (same | following).all(axis=1) & (starts[:, 0] == 0) & (starts[:, -1] + steps[:, -1] == shapes[:, dim])
        place = place * shapes[:, dim, None] + offsets[:, :, dim]
    place.sort(axis=1)
    overlaps: Array = (place[:, 1:] == place[:, :-1]).any(axis=1)  # in a grid, chunks that differ are disjoint
    for row in np.nonzero(~grid)[0].tolist():
        boxes = map(Box, map(tuple, offsets[row].tolist()), map(tuple, lengths[row].tolist()))
        overlaps[row] = not make_up(Box.whole(shapes[row].tolist()), boxes)
    return overlaps
