"""The positions of the chunks of many tensors in one flat buffer per rank.

Tensors that are sharded over N ranks, each along a dim of its own, are kept in one flat buffer per rank, its *section*:
this rank's chunk of every tensor, one after the other. A section is the input of an all-gather, and the result of a
reduce-scatter. A `FlatPlan` has the sizes, and copies between whole tensors and the N sections one after the other,
which collectives use.

Chunks are those of torch.chunk: the first ranks have chunks of equal length, one rank may have a shorter one, and the
rest have none. So ranks form few *runs* with equal sections, and the chunks of a run are one strided view, whether the
run has two ranks or thousands: no work here is done for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from terrazzo._torch.tensors import chunk_cat

Shape = tuple[int, ...]

# With so many ranks or more, no work is done for each rank, here or in a backend: no tables of sizes, and no message to
# each rank.
MANY = 64

# Bytes whose multiples sections of equal length have on accelerators: what their backends reduce fastest.
ALIGNMENT = 128

# By which factor padding may lengthen sections. The alternative to padding, adding buffers of zeros, sends twice the
# bytes.
_WORTH_PADDING = 2


class _Block(NamedTuple):
    """The chunks of one tensor in the sections of ranks `first` to `stop`, each of `length` along its dim."""

    tensor: int
    first: int
    stop: int
    length: int
    offset: int  # of the first chunk, in all sections together
    stride: int  # from one chunk to the next


def has_many(n: int) -> bool:
    """Whether there are so many ranks that no work may be done for each of them."""
    return n >= MANY


def worth_padding(shapes: Sequence[Shape], dims: Sequence[int], n: int) -> bool:
    """Whether padding chunks to equal length adds little."""
    there = padded = 0
    for shape, dim in zip(shapes, dims, strict=True):
        row = prod(shape[:dim]) * prod(shape[dim + 1 :])
        there += shape[dim] * row
        padded += -(-shape[dim] // n) * n * row
    return padded <= _WORTH_PADDING * there


class FlatPlan:
    """The chunks of tensors of `shapes`, sharded along `dims` over `n` ranks, for rank `index`.

    With `equal`, every chunk is padded to the longest of its tensor, so that all sections have equal length, which
    reduce-scatters of backends need. Every section ends with `extra` elements. A plan is `ragged` if there are very
    many sections of different lengths. Tensors without dims may be there if `n` is 1.
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
        self._lengths = [shape[dim] if shape else 1 for shape, dim in zip(shapes, dims, strict=True)]
        self._steps = [-(-length // n) for length in self._lengths]  # the longest chunk
        self._rows = [prod(shape[:dim]) * prod(shape[dim + 1 :]) for shape, dim in zip(shapes, dims, strict=True)]
        even = all(step * n == length for step, length in zip(self._steps, self._lengths, strict=True))
        self.padded = equal and not even  # whether there is padding between chunks
        self._runs = [(0, n)] if equal or even else self._unequal_runs()
        self.own_size = self.size_of(index)
        self.own_shapes: list[Shape] = [
            (*shape[:dim], self._chunk(i, index), *shape[dim + 1 :]) if shape else ()
            for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
        ]
        numels = [prod(shape) for shape in self.own_shapes]
        # The lengths in this rank's section: a chunk, its padding, the next chunk, ... and the extra elements.
        self.own_splits: list[int] = []
        for i, numel in enumerate(numels):
            self.own_splits += [numel, self._room(i, index) - numel] if self.padded else [numel]
        self.own_splits += [extra] if extra else []
        self._own_at = [2 * i if self.padded else i for i in range(len(numels))]
        self.total = sum((stop - first) * self.size_of(first) for first, stop in self._runs)
        self.alike = equal or even
        self.ragged = has_many(n) and not self.alike
        # Chunks that are contiguous in their tensor and equal on all ranks: the tensor is then a row per rank.
        self.aligned = even and all(prod(shape[:dim]) == 1 for shape, dim in zip(shapes, dims, strict=True))

    # ------------------------------------------------------------------ sizes

    def _chunk(self, tensor: int, rank: int) -> int:
        """The length of a rank's chunk along the tensor's dim, without padding."""
        step = self._steps[tensor]
        return min(max(self._lengths[tensor] - step * rank, 0), step)

    def _room(self, tensor: int, rank: int) -> int:
        """The elements of a rank's section for a tensor, with padding."""
        return self._rows[tensor] * (self._steps[tensor] if self.equal else self._chunk(tensor, rank))

    def _unequal_runs(self) -> list[tuple[int, int]]:
        marks = {0, self.n}
        for length, step in zip(self._lengths, self._steps, strict=True):
            full = length // step if step else 0
            marks |= {min(full, self.n), min(full + 1, self.n)}
        ordered = sorted(marks)
        return list(zip(ordered, ordered[1:], strict=False))

    def size_of(self, rank: int) -> int:
        """The number of elements in a rank's section."""
        return sum(self._room(i, rank) for i in range(len(self.shapes))) + self.extra

    @cached_property
    def own_start(self) -> int:
        """The offset of this rank's section."""
        return sum(
            (min(stop, self.index) - first) * self.size_of(first) for first, stop in self._runs if first < self.index
        )

    def moved(self, itemsize: int) -> int:
        """The bytes that a rank sends for one collective, on average."""
        return (2 if self.ragged else 1) * (self.n - 1) * self.total * itemsize // self.n

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements in each rank's section."""
        found: tuple[int, ...] = ()
        for first, stop in self._runs:
            found += (self.size_of(first),) * (stop - first)
        return found

    @cached_property
    def _blocks(self) -> list[_Block]:
        """The positions of all chunks; the extra elements are listed like another tensor."""
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
        """This rank's chunk of each tensor, as views of its section, which may lack the extra elements."""
        whole = section.numel() == self.own_size
        parts = section.split_with_sizes(self.own_splits if whole else self.own_splits[:-1])
        return [parts[at].view(shape) for at, shape in zip(self._own_at, self.own_shapes, strict=True)]

    def own_columns(self, sections: Tensor) -> list[Tensor]:
        """The chunks of each tensor, from several sections of this rank, of which each is a row."""
        parts = sections.split_with_sizes(self.own_splits, 1)
        return [parts[at].unflatten(1, shape) for at, shape in zip(self._own_at, self.own_shapes, strict=True)]

    def own_chunks(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's chunk of each tensor, as views of the tensors."""
        return [
            whole.narrow(dim, min(step * self.index, length), shape[dim]) if shape else whole
            for whole, dim, step, length, shape in zip(
                wholes, self.dims, self._steps, self._lengths, self.own_shapes, strict=True
            )
        ]

    # ------------------------------------------------------------------ all sections

    def pieces(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as views for `unpack`, which can be computed once. Sections must have no extra elements."""
        if self.aligned:
            return [whole.view(self.n, -1) for whole in wholes]
        return [self._in_tensor(block, wholes[block.tensor]) for block in self._blocks]

    def unpack(self, sections: Tensor, pieces: list[Tensor]) -> None:
        """Fill the tensors of `pieces` from the sections of all ranks, which have no extra elements."""
        if not self.aligned:
            torch._foreach_copy_(pieces, [self._in_sections(block, sections) for block in self._blocks])
            return
        torch.split_with_sizes_copy(sections.view(self.n, -1), self.own_splits, 1, out=pieces)

    def pack(self, wholes: Sequence[Tensor], sections: Tensor, extra: Tensor | None = None) -> None:
        """Copy the chunks of the tensors into the sections, converted to their dtype.

        `extra` is copied to the end of every section.
        """
        if self.aligned:
            rows = [whole.reshape(self.n, -1) for whole in wholes]
            if extra is not None:
                rows.append(extra.expand(self.n, -1))
            dtypes = {whole.dtype for whole in wholes}
            if sections.is_cpu or dtypes == {sections.dtype} or len(dtypes) > 1:
                torch.cat(rows, 1, out=sections.view(self.n, -1))
            else:  # for these torch.cat has a kernel for each input, and this one for all
                rows = [row.to(wholes[0].dtype) for row in rows]
                chunk_cat(rows, 0, self.n, out=sections.view(self.n, -1))
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

    def rows(self, sections: Tensor) -> list[list[Tensor]]:
        """For each tensor its chunks in the sections of all ranks: views with a row per rank, for ranks whose
        chunks have the same length."""
        found: list[list[Tensor]] = [[] for _ in range(len(self.shapes) + 1)]
        for block in self._blocks:
            found[block.tensor].append(self._in_sections(block, sections))
        return found[:-1]

    def rows_of(self, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """The same chunks in the tensors, which may lack the last ones. Other dims than those that are cut may differ
        from the plan's."""
        found: list[list[Tensor]] = [[] for _ in wholes]
        for block in self._blocks:
            if block.tensor < len(found):
                found[block.tensor].append(self._in_tensor(block, wholes[block.tensor]))
        return found

    def _in_tensor(self, block: _Block, whole: Tensor) -> Tensor:
        """The block's chunks in the tensor, as a row per rank."""
        dim, ranks = self.dims[block.tensor], block.stop - block.first
        start = block.first * self._steps[block.tensor]
        part = whole.narrow(dim, start, ranks * block.length)
        return part.unflatten(dim, (ranks, block.length)).movedim(dim, 0)

    def _in_sections(self, block: _Block, sections: Tensor) -> Tensor:
        """The block's chunks in the sections, as a row per rank."""
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
