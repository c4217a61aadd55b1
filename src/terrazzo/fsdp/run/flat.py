"""Where the pieces of many tensors lie in one flat buffer per rank.

Tensors that N ranks cut, each along a dim of its own, are held as one flat buffer per rank, its *section*: this rank's
chunk of every tensor, one after the other.  A section is what an all-gather sends as it is, and what a reduce-scatter
returns.  A `FlatPlan` knows the sizes, and copies between whole tensors and the N sections in a row, as collectives see
them.

Chunks follow torch.chunk: of each tensor the first ranks have equally long ones, one rank may have a shorter one, and
the rest have none.  So ranks form few *runs* whose sections look alike, and what lies in a run is one strided view, be
it of two ranks or of thousands: nothing here is done rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]

# From so many ranks on nothing is done for each of them, here or by a backend: no tables of what passes between any
# two, and no message to each.
MANY = 64

# How often padded chunks may be as long as chunks are. A collective that takes sections of any length, for which one
# reduces what each rank has put in its place, sends twice as much as there is.
_WORTH_PADDING = 2


class _Block(NamedTuple):
    """The chunks of one tensor in the sections of the ranks `first` up to `stop`, `length` long along its dim each."""

    tensor: int
    first: int
    stop: int
    length: int
    offset: int  # of the first of them, in all sections together
    stride: int  # from one to the next


def has_many(n: int) -> bool:
    """Whether there are so many ranks that nothing may be done for each of them."""
    return n >= MANY


def worth_padding(shapes: Sequence[Shape], dims: Sequence[int], n: int) -> bool:
    """Whether chunks of equal length are not much more than what there is."""
    there = padded = 0
    for shape, dim in zip(shapes, dims, strict=True):
        row = prod(shape[:dim]) * prod(shape[dim + 1 :])
        there += shape[dim] * row
        padded += -(-shape[dim] // n) * n * row
    return padded <= _WORTH_PADDING * there


class FlatPlan:
    """The chunks of tensors of `shapes`, cut along `dims` over `n` ranks, seen from position `index`.

    With `equal` every chunk is padded to the longest of its tensor, so that all sections are alike: backends that
    reduce while they scatter want that. `extra` elements lie at the end of every section. A plan is `ragged` if there
    are very many sections that are not alike.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        dims: Sequence[int],
        n: int,
        index: int,
        equal: bool = False,
        extra: int = 0,
    ) -> None:
        self.shapes, self.dims, self.n, self.index, self.extra = tuple(shapes), tuple(dims), n, index, extra
        self.equal = equal
        self._lengths = [shape[dim] for shape, dim in zip(shapes, dims, strict=True)]
        self._steps = [-(-length // n) for length in self._lengths]  # the longest chunk
        self._rows = [prod(shape[:dim]) * prod(shape[dim + 1 :]) for shape, dim in zip(shapes, dims, strict=True)]
        even = all(step * n == length for step, length in zip(self._steps, self._lengths, strict=True))
        self.padded = equal and not even  # whether there is something between chunks
        self._runs = [(0, n)] if equal or even else self._unequal_runs()
        self.own_size = self.size_of(index)
        self.own_shapes: list[Shape] = [
            (*shape[:dim], self._chunk(i, index), *shape[dim + 1 :])
            for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
        ]
        numels = [prod(shape) for shape in self.own_shapes]
        # How this rank's section splits: a chunk, what pads it, the next chunk, ... and what is extra.
        self.own_splits: list[int] = []
        for i, numel in enumerate(numels):
            self.own_splits += [numel, self._room(i, index) - numel] if self.padded else [numel]
        self.own_splits += [extra] if extra else []
        self._own_at = [2 * i if self.padded else i for i in range(len(numels))]
        self.total = sum((stop - first) * self.size_of(first) for first, stop in self._runs)
        self.alike = equal or even
        self.ragged = has_many(n) and not self.alike
        # Chunks that are contiguous in their tensor, and alike on all ranks: then a tensor is a row per rank.
        self.aligned = even and all(prod(shape[:dim]) == 1 for shape, dim in zip(shapes, dims, strict=True))

    # ------------------------------------------------------------------ sizes

    def _chunk(self, tensor: int, rank: int) -> int:
        """The length of a rank's chunk along the tensor's dim."""
        step = self._steps[tensor]
        return min(max(self._lengths[tensor] - step * rank, 0), step)

    def _room(self, tensor: int, rank: int) -> int:
        """Elements of the rank's section that are for the tensor."""
        return self._rows[tensor] * (self._steps[tensor] if self.equal else self._chunk(tensor, rank))

    def _unequal_runs(self) -> list[tuple[int, int]]:
        marks = {0, self.n}
        for length, step in zip(self._lengths, self._steps, strict=True):
            full = length // step if step else 0
            marks |= {min(full, self.n), min(full + 1, self.n)}
        ordered = sorted(marks)
        return list(zip(ordered, ordered[1:], strict=False))

    def size_of(self, rank: int) -> int:
        """Elements of a rank's section."""
        return sum(self._room(i, rank) for i in range(len(self.shapes))) + self.extra

    @cached_property
    def own_start(self) -> int:
        """Where this rank's section begins."""
        return sum(
            (min(stop, self.index) - first) * self.size_of(first) for first, stop in self._runs if first < self.index
        )

    def moved(self, itemsize: int) -> int:
        """Bytes that a rank sends, on average, for one collective."""
        return (2 if self.ragged else 1) * (self.n - 1) * self.total * itemsize // self.n

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each rank's section."""
        found: tuple[int, ...] = ()
        for first, stop in self._runs:
            found += (self.size_of(first),) * (stop - first)
        return found

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Where all chunks are; the extra elements come as those of a tensor after the last."""
        found = []
        start = 0
        for first, stop in self._runs:
            stride = self.size_of(first)
            offset = start
            for i, step in enumerate(self._steps):
                if self.equal:
                    full = min(self._lengths[i] // step, self.n) if step else 0
                    if full:
                        found.append(_Block(i, 0, full, step, offset, stride))
                    rest = self._lengths[i] - full * step
                    if rest:
                        found.append(_Block(i, full, full + 1, rest, full * stride + offset, stride))
                else:
                    length = self._chunk(i, first)
                    if length:
                        found.append(_Block(i, first, stop, length, offset, stride))
                offset += self._room(i, first)
            if self.extra:
                found.append(_Block(len(self.shapes), first, stop, self.extra, offset, stride))
            start += (stop - first) * stride
        return found

    # ------------------------------------------------------------------ this rank's section

    def own_views(self, section: Tensor) -> list[Tensor]:
        """This rank's chunk of each tensor, in its section, or what of it comes before the extra elements."""
        whole = section.numel() == self.own_size
        parts = section.split_with_sizes(self.own_splits if whole else self.own_splits[:-1])
        return [parts[at].view(shape) for at, shape in zip(self._own_at, self.own_shapes, strict=True)]

    def own_chunks(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's chunk of each tensor, as a view of it."""
        return [
            whole.narrow(dim, min(step * self.index, length), shape[dim])
            for whole, dim, step, length, shape in zip(
                wholes, self.dims, self._steps, self._lengths, self.own_shapes, strict=True
            )
        ]

    # ------------------------------------------------------------------ all sections

    def pieces(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as `unpack` wants them; computed once for tensors that stay. Sections have nothing extra."""
        if self.aligned:
            return [whole.view(self.n, -1) for whole in wholes]
        return [self._in_tensor(block, wholes[block.tensor]) for block in self._blocks]

    def unpack(self, sections: Tensor, pieces: list[Tensor]) -> None:
        """Fill the tensors behind `pieces` from the sections of all ranks, which have nothing extra."""
        if not self.aligned:
            torch._foreach_copy_(pieces, [self._in_sections(block, sections) for block in self._blocks])
            return
        torch.split_with_sizes_copy(sections.view(self.n, -1), self.own_splits, 1, out=pieces)

    def pack(self, wholes: Sequence[Tensor], sections: Tensor, extra: Tensor | None = None) -> None:
        """Write the chunks of the tensors where the collective expects them, converting to the dtype of `sections`.

        `extra` goes to the end of every section.
        """
        if self.aligned:
            rows = [whole.reshape(self.n, -1) for whole in wholes]
            if extra is not None:
                rows.append(extra.expand(self.n, -1))
            torch.cat(rows, 1, out=sections.view(self.n, -1))
            return
        if self.padded:
            sections.zero_()
        parts, pieces = [], []
        for block in self._blocks:
            parts.append(self._in_sections(block, sections))
            if block.tensor < len(self.shapes):
                pieces.append(self._in_tensor(block, wholes[block.tensor]))
            else:
                assert extra is not None
                pieces.append(extra.expand(block.stop - block.first, -1))
        torch._foreach_copy_(parts, pieces)

    def _in_tensor(self, block: _Block, whole: Tensor) -> Tensor:
        """A row per rank."""
        dim, ranks = self.dims[block.tensor], block.stop - block.first
        start = block.first * self._steps[block.tensor]
        part = whole.narrow(dim, start, ranks * block.length)
        return part.unflatten(dim, (ranks, block.length)).movedim(dim, 0)

    def _in_sections(self, block: _Block, sections: Tensor) -> Tensor:
        """The same rows in the sections."""
        if block.tensor < len(self.shapes):
            shape, dim = self.shapes[block.tensor], self.dims[block.tensor]
            chunk = (*shape[:dim], block.length, *shape[dim + 1 :])
        else:
            chunk = (block.length,)
        strides = [1] * len(chunk)
        for i in range(len(chunk) - 2, -1, -1):
            strides[i] = strides[i + 1] * chunk[i + 1]
        offset = sections.storage_offset() + block.offset
        return sections.as_strided((block.stop - block.first, *chunk), (block.stride, *strides), offset)
