"""Sections of encoded tensors: the parts of all tensors that codecs make, in one flat plan of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from terrazzo.comm import wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.codecs import Codec
from terrazzo.comm.collectives import gather_into
from terrazzo.comm.flat import FlatPlan, Shape
from terrazzo.comm.pending import Pending
from terrazzo.comm.sections import report_collective
from terrazzo.comm.wire import ScaledSum

T = TypeVar("T")


class Encoded:
    """Tensors with a flat plan, of which each is sent by a codec."""

    def __init__(self, tensors: FlatPlan, codecs: Sequence[Codec], equal: bool, alignment: int = 1) -> None:
        """`equal`: whether sections get equal length, a multiple of `alignment` bytes."""
        self.tensors, self.codecs = tensors, tuple(codecs)
        # Of tensors whose last dim is cut the length of the longest chunk. Each chunk is padded to that, and encoded by
        # itself, so that it begins with a block; the parts have a row for each rank.
        self._steps: list[int | None] = []
        self._sizes: list[list[Shape]] = []
        dims: list[int] = []
        for codec, shape, dim in zip(codecs, tensors.shapes, tensors.dims, strict=True):
            apart = 0 < dim == len(shape) - 1 and tensors.n > 1
            step = -(-shape[-1] // tensors.n) if apart else None
            sizes = codec.size(shape if step is None else (*shape[:-1], step))
            self._steps.append(step)
            self._sizes.append(sizes if step is None else [(tensors.n, *size) for size in sizes])
            dims += [0 if apart else dim] * len(sizes)
        shapes = [shape for sizes in self._sizes for shape in sizes]
        plan = FlatPlan(shapes, dims, tensors.n, tensors.index, equal, tensors.extra)
        rest = -plan.own_size % alignment
        if equal and rest:  # a part of no tensor, so that there is nothing behind the presence flags
            shapes, dims = [*shapes, (tensors.n * rest,)], [*dims, 0]
            plan = FlatPlan(shapes, dims, tensors.n, tensors.index, equal, tensors.extra)
        self.plan = plan

    def _of_tensors(self, parts: Sequence[T]) -> list[list[T]]:
        """The parts of each tensor."""
        found = iter(parts)
        return [[next(found) for _ in sizes] for sizes in self._sizes]

    def _encoded(self, tensors: Sequence[Tensor], n: int) -> list[list[Tensor]]:
        """The parts of tensors of `n` ranks: of all, or of one rank's chunks."""
        found = zip(self.codecs, tensors, self._steps, strict=True)
        return [codec.encode(x if step is None else _by_rank(x, n, step)) for codec, x, step in found]

    # ------------------------------------------------------------------ gathers

    def section(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """This rank's section, from the parts of its chunk of each tensor."""
        flat = [part for each in parts for part in each]
        section = flat[0].new_zeros(self.plan.own_size)
        torch._foreach_copy_(self.plan.own_views(section)[: len(flat)], flat)
        return section

    def encode(self, chunks: Sequence[Tensor]) -> Tensor:
        """This rank's section, from its chunk of each tensor."""
        return self.section(self._encoded(chunks, 1))

    def decode(self, sections: Tensor, wholes: Sequence[Tensor]) -> None:
        """Fill the tensors from the sections of all ranks."""
        filled = [self._to_fill(whole, step) for whole, step in zip(wholes, self._steps, strict=True)]
        into = self.plan.rows_of([x for x, sizes in zip(filled, self._sizes, strict=True) for _ in sizes])
        parts = self._of_tensors(self.plan.rows(sections))
        for codec, own, outs in zip(self.codecs, parts, self._of_tensors(into), strict=True):
            for i, out in enumerate(outs[0]):
                codec.decode([rows[i] for rows in own], out)
        for whole, x, step in zip(wholes, filled, self._steps, strict=True):
            if step is not None and whole.shape[-1] != self.plan.n * step:
                whole.copy_(x.movedim(0, -2).flatten(-2)[..., : whole.shape[-1]])

    def _to_fill(self, whole: Tensor, step: int | None) -> Tensor:
        """The tensor as its parts are: if its last dim is cut a row for each rank, in memory of its own if these are
        uneven."""
        n = self.plan.n
        if step is None or whole.shape[-1] == n * step:
            return whole if step is None else _by_rank(whole, n, step)
        return whole.new_empty((n, *whole.shape[:-1], step))

    def rounded(self, i: int, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """What all ranks decode, in `dtype`, of this rank's chunk of the tensor `i`."""
        codec, step = self.codecs[i], self._steps[i]
        sent = chunk if step is None else _by_rank(chunk, 1, step)
        values = torch.empty(sent.shape, dtype=dtype, device=chunk.device)
        codec.decode(codec.encode(sent), values)
        return values if step is None else values[0, ..., : chunk.shape[-1]]

    # ------------------------------------------------------------------ reductions

    def pack(self, wholes: Sequence[Tensor], reached: Tensor | None) -> Tensor:
        """The sections of all ranks; `reached` is the extra elements."""
        parts = [part for each in self._encoded(wholes, self.plan.n) for part in each]
        padding = [parts[0].new_zeros(shape) for shape in self.plan.shapes[len(parts) :]]
        sections = parts[0].new_empty(self.plan.total)
        self.plan.pack([*parts, *padding], sections, None if reached is None else reached.to(torch.uint8))
        return sections

    def reduce(self, sections: Tensor, axis: Axis, dtype: torch.dtype, op: str | ScaledSum) -> Pending[Tensor]:
        """Start to reduce packed tensors; each rank gets its section of the plan of the tensors, in `dtype`.

        Each rank adds what it has decoded, in single precision. `op` is sum, avg or a scaled sum.
        """
        report_collective("all_to_all", axis, self.plan, sections, None)
        received = torch.empty_like(sections)
        work = wire.all_to_all(axis, received, sections)
        return Pending("all_to_all", axis, work, received, lambda: self._sum(received, dtype, op))

    def held(self, itemsize: int) -> int:
        """The most bytes that `all_reduce` of elements of this size holds besides the tensors: two buffers of encoded
        sections, and this rank's sums."""
        return 2 * self.plan.total + self.plan.own_size + self.tensors.own_size * itemsize

    def all_reduce(self, section: Tensor, chunks: Sequence[Tensor], axis: Axis, op: str) -> Pending[Tensor]:
        """Start to reduce `chunks`, of which every rank has all, and the extra elements behind them in `section`, in
        place.

        Each rank adds its part of each chunk as `reduce` does, and sends the sums encoded again, so that all have the
        same.
        """
        extra = self.tensors.extra
        reached = section[-extra:] if extra else None
        summed = self.reduce(self.pack(chunks, None if reached is None else reached > 0), axis, section.dtype, op)

        def finish() -> Tensor:
            own = summed.wait()
            if reached is not None:
                reached.copy_(own[-extra:])
            sent = self.encode(self.tensors.own_views(own))
            report_collective("all_gather", axis, self.plan, sent, None)
            sections = sent.new_empty(self.plan.total)
            self.decode(Pending("all_gather", axis, gather_into(axis, sections, sent), sections).wait(), chunks)
            return section

        return Pending("all_reduce", axis, None, section, finish)

    def _sum(self, received: Tensor, dtype: torch.dtype, op: str | ScaledSum) -> Tensor:
        n, tensors = self.plan.n, self.tensors
        section = received.new_zeros(tensors.own_size, dtype=dtype)
        columns = self.plan.own_columns(received.view(n, -1))
        factor = 1 / n if op == "avg" else op.factor if isinstance(op, ScaledSum) else 1.0
        own = zip(self.codecs, self._of_tensors(columns), tensors.own_views(section), self._steps, strict=True)
        for codec, parts, chunk, step in own:
            shape = chunk.shape if step is None else (1, *chunk.shape[:-1], step)
            terms = torch.empty((n, *shape), dtype=torch.float32, device=section.device)
            codec.decode(parts, terms)
            summed = terms.sum(0).mul_(factor)
            chunk.copy_(summed if step is None else summed[0, ..., : chunk.shape[-1]])
        if tensors.extra:
            section[-tensors.extra :] = received.view(n, -1)[:, -tensors.extra :].sum(0)
        return section


def _by_rank(x: Tensor, n: int, step: int) -> Tensor:
    """The chunks of `x` along its last dim, a row for each of `n` ranks: a view, or a copy if zeros are added."""
    missing = n * step - x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded.unflatten(-1, (n, step)).movedim(-2, 0)


__all__ = ["Encoded"]
