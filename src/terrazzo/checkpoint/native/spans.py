"""Stored chunks, and which bytes of one to read for a box: pure arithmetic.

Every item asks for a box of a stored chunk. Its bytes are cut into *runs*, each of which is read as a whole:

    the box is one run of the chunk         it can be read straight into a destination of the same dtype
    its rows lie close together             windows of it, gaps included, pass through a buffer
    its rows lie far apart                  each row by itself, so that what lies between them is not read

Checksums are per block, so a run begins and ends at blocks (or at its chunk's end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from terrazzo.checkpoint.native.format import itemsize_of
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.layout.box import Box


class StoredChunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A chunk where it lies: `nbytes` from `start` on in `file`, a checksum for each `block` bytes."""

    name: str
    file: FileEntry
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    block: int
    sums: Any  # an array, in which those of this chunk begin at `first_sum`
    first_sum: int
    codec: int = 0
    frames: Any = None  # with a codec: an array of the stored bytes of each block, from `first_frame` on
    first_frame: int = 0
    strides: tuple[int, ...] | None = None  # of other formats' tensors, in elements; None: row-major
    crc: int = 0  # the CRC-32 of all bytes, of formats that have that; 0: unknown

    @property
    def blocks(self) -> int:
        """In how many blocks it is stored."""
        return -(-self.nbytes // self.block)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return itemsize_of(self.dtype)

    def stored(self, low: int, high: int) -> tuple[int, list[int]]:
        """Where in the file the blocks begin that have the bytes from `low` to `high`, and the stored bytes of each.

        Both are the beginning of a block, or the chunk's end.
        """
        if not self.codec:
            return self.start + low, [min(self.block, high - at) for at in range(low, high, self.block)]
        first, last = low // self.block, -(-high // self.block)
        frames = self.frames[self.first_frame :][:last]
        return self.start + int(frames[:first].sum()), frames[first:].tolist()


class WantedBox(msgspec.Struct, eq=False, gc=False):
    """A box of a stored chunk that is to be read, and the memory that it fills.

    Where many tensors ask, `number` says which of them does, and `part` what of it this is, unless it is all.
    """

    chunk: StoredChunk
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    number: int = 0
    part: Box | None = None
    memory: Any = None  # a tensor of these lengths, set before it is read

    def of(self, tensor: Any) -> WantedBox:
        """This box with memory: its part of a tensor, which reading fills."""
        self.memory = tensor if self.part is None else tensor[self.part.slices()]
        return self


class Span(msgspec.Struct, frozen=True):
    """Bytes `low` to `high` of a chunk, and where in them the elements of `box` are."""

    box: Box
    inside: Box  # the same within the box that was asked for
    low: int
    high: int
    first: int  # byte of the box's first element, from `low` on
    geometry: BoxInChunk
    in_one_run: bool  # all bytes from `low` to `high` are the box's


def spans(chunk: StoredChunk, box: Box, *, block: int, gap: int, limit: int, bounded: bool = False) -> list[Span]:
    """A box of a chunk as what has to be read.

    `block` is what is checked as a whole (1: nothing is checked), `gap` the bytes that are not worth skipping, `limit`
    about the most that a span has, unless it is in one run and not to be `bounded`.

    >>> chunk = StoredChunk("w", FileEntry("f", 800, 0, 0), 0, 800, (2, 100), "float32", 8, None, 0)
    >>> [(span.low, span.high) for span in spans(chunk, Box((0, 0), (2, 1)), block=1, gap=0, limit=1000)]
    [(0, 4), (400, 404)]
    >>> [(span.low, span.high) for span in spans(chunk, Box((0, 0), (2, 1)), block=8, gap=500, limit=1000)]
    [(0, 408)]
    """
    strides = strides_of(chunk.shape) if chunk.strides is None else chunk.strides
    nbytes, itemsize = chunk.nbytes, chunk.itemsize
    whole = _span(box, box, strides, nbytes, itemsize, block)
    if whole.in_one_run and not bounded:
        return [whole]
    found = []
    for part in _rows_apart(box, strides, itemsize, gap + 2 * (block - 1)):
        for window in windows(part, strides, max(limit // itemsize, 1)):
            found.append(_span(window, box, strides, nbytes, itemsize, block))
    return found


def _span(box: Box, asked: Box, strides: tuple[int, ...], nbytes: int, itemsize: int, block: int) -> Span:
    geometry = box_in_chunk(box, strides)
    start, stop = geometry.start * itemsize, geometry.stop * itemsize
    low, high = start - start % block, min(-(-stop // block) * block, nbytes)
    return Span(
        box, box.relative_to(asked), low, high, start - low, geometry, geometry.one_run and (low, high) == (start, stop)
    )


def _rows_apart(box: Box, strides: tuple[int, ...], itemsize: int, gap: int) -> list[Box]:
    """The box, or its rows along the first dims if more than `gap` bytes lie between them."""
    dim = _outermost(box, strides)
    if dim is None:
        return [box]
    row = box.split(dim, [1, box.lengths[dim] - 1])[0]
    place = box_in_chunk(row, strides)
    between = (place.strides[dim] - (place.stop - place.start)) * itemsize
    if between <= gap:
        return [box]
    rows = box.split(dim, [1] * box.lengths[dim])
    return [part for each in rows for part in _rows_apart(each, strides, itemsize, gap)]


def _outermost(box: Box, strides: Sequence[int]) -> int | None:
    """The dim along which the elements of a box are farthest apart: of a row-major chunk, the first one."""
    return max((d for d, length in enumerate(box.lengths) if length > 1), key=strides.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class BoxInChunk:
    """Where a box lies in the flattened chunk: within `start` to `stop`, at these strides from `start` on."""

    start: int
    stop: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    one_run: bool  # every element from `start` to `stop` belongs to the box


def box_in_chunk(box: Box, strides: tuple[int, ...]) -> BoxInChunk:
    """Where a box that is not empty lies in a chunk with these strides.

    >>> box_in_chunk(Box((1, 0), (2, 3)), (3, 1))
    BoxInChunk(start=3, stop=9, lengths=(2, 3), strides=(3, 1), one_run=True)
    """
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    return BoxInChunk(start, start + last + 1, box.lengths, strides, _is_run(box.lengths, strides))


def _is_run(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements at these strides follow each other in row-major order."""
    step = 1
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def windows(box: Box, strides: tuple[int, ...], limit: int) -> list[Box]:
    """The box in pieces, each of which lies within `limit` elements of the flattened chunk.

    >>> windows(Box((0, 0), (3, 2)), (4, 1), 6)
    [Box(offsets=(0, 0), lengths=(2, 2)), Box(offsets=(2, 0), lengths=(1, 2))]
    """
    place, dim = box_in_chunk(box, strides), _outermost(box, strides)
    if dim is None or place.stop - place.start <= limit:
        return [box]
    row = box.split(dim, [1, box.lengths[dim] - 1])[0]
    row_place = box_in_chunk(row, strides)
    room = limit - (row_place.stop - row_place.start)
    if room < 0:
        rows = box.split(dim, [1] * box.lengths[dim])
        return [window for part in rows for window in windows(part, strides, limit)]
    step = 1 + room // strides[dim]
    length = box.lengths[dim]
    return list(box.split(dim, [min(step, length - start) for start in range(0, length, step)]))
