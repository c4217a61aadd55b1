"""Boxes of a chunk as runs of its row-major elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class BoxInChunk:
    """Where a box lies in the flattened chunk: within `start` to `stop`, at these strides from `start` on."""

    start: int
    stop: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    one_run: bool  # every element from `start` to `stop` belongs to the box


def box_in_chunk(box: Box, shape: Sequence[int]) -> BoxInChunk:
    """Where a box that is not empty lies in a chunk of this shape.

    >>> box_in_chunk(Box((1, 0), (2, 3)), (4, 3))
    BoxInChunk(start=3, stop=9, lengths=(2, 3), strides=(3, 1), one_run=True)
    """
    strides = strides_of(shape)
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    return BoxInChunk(start, start + last + 1, box.lengths, strides, box.numel == last + 1)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def windows(box: Box, shape: Sequence[int], limit: int) -> list[Box]:
    """The box in pieces, each of which lies within `limit` elements of the flattened chunk.

    >>> windows(Box((0, 0), (3, 2)), (3, 4), 6)
    [Box(offsets=(0, 0), lengths=(2, 2)), Box(offsets=(2, 0), lengths=(1, 2))]
    """
    place = box_in_chunk(box, shape)
    if place.stop - place.start <= limit:
        return [box]
    dim = next(d for d, length in enumerate(box.lengths) if length > 1)
    row = box.split(dim, [1, box.lengths[dim] - 1])[0]
    row_place = box_in_chunk(row, shape)
    room = limit - (row_place.stop - row_place.start)
    if room < 0:
        rows = box.split(dim, [1] * box.lengths[dim])
        return [window for part in rows for window in windows(part, shape, limit)]
    step = 1 + room // place.strides[dim]
    length = box.lengths[dim]
    return list(box.split(dim, [min(step, length - start) for start in range(0, length, step)]))
