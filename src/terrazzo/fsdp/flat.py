"""Where the pieces of many tensors lie in one flat buffer per rank.

Tensors that N ranks cut, each along a dim of its own, are held as one flat buffer per rank: this rank's chunk of every
tensor, one after the other.  That buffer is what an all-gather sends as it is, and what a reduce-scatter returns.  A
`FlatPlan` knows the sizes, and copies between whole tensors and the N buffers in a row, as collectives see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from terrazzo.layout import chunk_sizes

Shape = tuple[int, ...]


class FlatPlan:
    """The chunks of tensors of `shapes`, cut along `dims` over `n` ranks, seen from position `index`.

    With `equal` every rank's buffer is as long as the longest: backends that reduce while they scatter want that.
    """

    __slots__ = (
        "aligned",
        "dims",
        "index",
        "n",
        "numels",
        "own_shapes",
        "pads",
        "part_shapes",
        "shapes",
        "sizes",
        "spans",
    )

    def __init__(self, shapes: Sequence[Shape], dims: Sequence[int], n: int, index: int, equal: bool = False) -> None:
        self.shapes, self.dims, self.n, self.index = tuple(shapes), tuple(dims), n, index
        lengths = [chunk_sizes(shape[dim], n) for shape, dim in zip(shapes, dims, strict=True)]
        self.part_shapes: list[list[Shape]] = [
            [
                (*shape[:dim], parts[rank], *shape[dim + 1 :])
                for shape, dim, parts in zip(shapes, dims, lengths, strict=True)
            ]
            for rank in range(n)
        ]
        self.spans = [
            [(start, size) for start, size in zip(accumulate(parts, initial=0), parts, strict=False)]
            for parts in lengths
        ]  # by tensor and rank: where the rank's chunk lies along the tensor's dim
        self.numels = [[prod(shape) for shape in parts] for parts in self.part_shapes]
        totals = [sum(parts) for parts in self.numels]
        self.pads = [max(totals) - total if equal else 0 for total in totals]
        self.sizes = tuple(total + pad for total, pad in zip(totals, self.pads, strict=True))
        self.own_shapes = self.part_shapes[index]
        # Chunks that are contiguous in their tensor, and alike on all ranks: then a tensor is a row per rank.
        self.aligned = all(
            len(set(parts)) == 1 and prod(shape[:dim]) == 1
            for shape, dim, parts in zip(shapes, dims, lengths, strict=True)
        )

    @property
    def own_size(self) -> int:
        """Elements of this rank's buffer."""
        return self.sizes[self.index]

    @property
    def total(self) -> int:
        """Elements of all buffers together, which is what a collective moves."""
        return sum(self.sizes)

    def own_views(self, buffer: Tensor) -> list[Tensor]:
        """This rank's chunk of each tensor, in this rank's buffer."""
        parts = buffer.split_with_sizes(self._splits(self.index))
        return [part.view(shape) for part, shape in zip(parts, self.own_shapes, strict=False)]

    def pieces(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as `unpack` wants them; computed once for tensors that stay."""
        if self.aligned:
            return [whole.view(self.n, -1) for whole in wholes]
        return [
            whole.narrow(dim, *spans[rank])
            for rank in range(self.n)
            for whole, dim, spans in zip(wholes, self.dims, self.spans, strict=True)
        ]

    def unpack(self, buffers: Tensor, pieces: list[Tensor]) -> None:
        """Fill the tensors behind `pieces` from the buffers of all ranks, one after the other in `buffers`."""
        if self.aligned:
            rows = buffers.view(self.n, -1)
            torch.split_with_sizes_copy(rows, self._splits(0), 1, out=pieces)
            return
        torch._foreach_copy_(pieces, self._parts(buffers))

    def pack(self, wholes: Sequence[Tensor], buffers: Tensor) -> None:
        """Write the chunks of the tensors where the collective expects them, converting to the dtype of `buffers`."""
        if self.aligned:
            torch.cat([whole.reshape(self.n, -1) for whole in wholes], 1, out=buffers.view(self.n, -1))
            return
        if any(self.pads):
            buffers.zero_()
        torch._foreach_copy_(self._parts(buffers), self.pieces(wholes))

    def own_chunks(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's chunk of each tensor, as a view of it."""
        return [
            whole.narrow(dim, *spans[self.index])
            for whole, dim, spans in zip(wholes, self.dims, self.spans, strict=True)
        ]

    def _splits(self, rank: int) -> list[int]:
        return self.numels[rank] + [self.pads[rank]] if self.pads[rank] else self.numels[rank]

    def _parts(self, buffers: Tensor) -> list[Tensor]:
        """The chunk of each rank and tensor in `buffers`, in the order of `pieces`."""
        splits = [size for rank in range(self.n) for size in self._splits(rank)]
        parts = iter(buffers.split_with_sizes(splits))
        result = []
        for rank in range(self.n):
            for shape in self.part_shapes[rank]:
                result.append(next(parts).view(shape))
            if self.pads[rank]:
                next(parts)
        return result
