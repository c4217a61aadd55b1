"""Read a box of a tensor with any strides in a file, and little more than its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.layout.box import Box

_BUFFER: Final = 8 << 20
# Gaps shorter than this are read along, instead of making another read.
_SHORT: Final = 16 << 10


class Source(Protocol):
    """Bytes that can be read from anywhere."""

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class Strided:
    """The positions of a tensor's elements in a source: `start` in bytes, strides in elements."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def contiguous(start: int, dtype: torch.dtype, shape: Sequence[int]) -> Strided:
        """A tensor in row-major order.

        >>> Strided.contiguous(0, torch.float32, (2, 3)).strides
        (3, 1)
        """
        strides = []
        step = 1
        for length in reversed(shape):
            strides.append(step)
            step *= max(length, 1)
        return Strided(start, dtype, tuple(shape), tuple(reversed(strides)))

    def first(self, box: Box) -> int:
        """The index of the first element of a box."""
        return sum(offset * stride for offset, stride in zip(box.offsets, self.strides, strict=True))

    def span(self, box: Box) -> int:
        """The number of elements from the first to the last element of a box."""
        return 1 + sum((length - 1) * stride for length, stride in zip(box.lengths, self.strides, strict=True))

    def is_run(self, box: Box) -> bool:
        """Whether the elements of a box are contiguous, in row-major order."""
        step = 1
        for length, stride in zip(reversed(box.lengths), reversed(self.strides), strict=True):
            if length != 1:
                if stride != step:
                    return False
                step *= length
        return True


@torch.no_grad()
def read_box(source: Source, stored: Strided, box: Box, target: torch.Tensor) -> None:
    """Fill `target`, a tensor of the box's shape on any device and of any dtype, with the box of the stored tensor."""
    if box.is_empty:
        return
    itemsize = stored.dtype.itemsize
    direct = target.device.type == "cpu" and target.dtype == stored.dtype and not target.is_conj()
    if direct and target.is_contiguous() and stored.is_run(box):
        source.read_into(stored.start + stored.first(box) * itemsize, bytes_of(target))
        return
    buffer = torch.empty(0, dtype=stored.dtype, device="cpu")
    for piece in _pieces(stored, box, itemsize):
        span = stored.span(piece)
        if buffer.numel() < span:
            buffer = torch.empty(span, dtype=stored.dtype, device="cpu")
        used = buffer[:span]
        source.read_into(stored.start + stored.first(piece) * itemsize, bytes_of(used))
        target[piece.relative_to(box).slices()].copy_(used.as_strided(piece.lengths, stored.strides))


def _pieces(stored: Strided, box: Box, itemsize: int) -> Iterator[Box]:
    """Boxes that cover the box, whose spans fit into the buffer and have few other elements."""
    span = stored.span(box) * itemsize
    wanted = box.numel * itemsize
    if span <= _BUFFER and (span <= 2 * wanted or _run_length(stored, box) * itemsize < _SHORT):
        yield box
        return
    splittable = [dim for dim in range(box.ndim) if box.lengths[dim] > 1]
    if not splittable:
        yield box
        return
    dim = max(splittable, key=lambda d: (stored.strides[d], box.lengths[d]))
    half = box.lengths[dim] // 2
    for part in box.split(dim, (half, box.lengths[dim] - half)):
        yield from _pieces(stored, part, itemsize)


def _run_length(stored: Strided, box: Box) -> int:
    """The number of contiguous elements of the box."""
    step = 1
    for stride, length in sorted(zip(stored.strides, box.lengths, strict=True)):
        if length == 1:
            continue
        if stride > step:
            break
        step = max(step, stride * length)
    return step
