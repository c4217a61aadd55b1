"""Large groups on CPU: gathered directly into the parameters, and reduced directly from the gradients.

If the ranks' chunks of a tensor are equal rows, a rank's chunk is contiguous in it. So each chunk of a large tensor is
a message, which is received into the parameter, or sent from the gradient, without a buffer. All small tensors
together are one more message for each pair of ranks.

A gradient that is not contiguous, or missing on a rank, is copied there; the messages stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.pending import Pending
from terrazzo.comm.sections import exchange, goes_by_messages, mean_of_two, report_collective

_LARGE = 1 << 16  # bytes of a chunk that is a message of its own


class InPlace:
    """Which tensors of a flat plan have messages of their own. The plan is aligned."""

    def __init__(self, plan: FlatPlan, itemsize: int) -> None:
        self.plan = plan
        self._splits = plan.own_splits
        large = [i for i in range(len(plan.shapes)) if self._splits[i] * itemsize >= _LARGE]
        self._large = tuple(large)
        self._small = tuple(i for i in range(len(self._splits)) if i not in large)  # the last one is the extra elements
        self._small_splits = [self._splits[i] for i in self._small]

    @staticmethod
    def suits(plan: FlatPlan, axis: Axis, itemsize: int) -> bool:
        """Whether a group with this plan is sent this way: on CPU, if it and a tensor in it are large, and not with
        very many ranks."""
        large = max(plan.own_splits, default=0) * itemsize >= _LARGE
        return large and plan.aligned and goes_by_messages(axis, plan.total * itemsize)

    # ------------------------------------------------------------------ gathers

    @property
    def buffered(self) -> int:
        """The elements of the small tensors, which are gathered into a buffer."""
        return sum(self._small_splits) * self.plan.n

    def gather(self, part: Tensor, pieces: Sequence[Tensor], axis: Axis, tag: int) -> Pending[None]:
        """Start to fill `pieces`, a row per rank of each tensor, from all ranks' sections; `part` is this rank's."""
        n, own = axis.size, axis.index
        report_collective("all_gather", axis, self.plan, part, None)
        chunks = part.split_with_sizes(self._splits)
        rest = part.new_empty((n, sum(self._small_splits)))
        if self._small:
            torch.cat([chunks[i] for i in self._small], out=rest[own])
        outgoing = [chunks[i] for i in self._large] + [rest[own]]
        works = exchange(
            axis, [outgoing] * n, [[*(pieces[i][rank] for i in self._large), rest[rank]] for rank in range(n)], tag
        )
        torch._foreach_copy_([piece[own] for piece in pieces], chunks)  # while messages are under way
        small = [pieces[i] for i in self._small]

        def finish() -> None:
            if small:
                torch.split_with_sizes_copy(rest, self._small_splits, 1, out=small)

        return Pending("all_gather", axis, works, None, finish)

    # ------------------------------------------------------------------ reductions

    def reduce(self, wholes: Sequence[Tensor], extra: Tensor | None, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        """Start to reduce tensors; each rank gets its section. `op` is sum or avg."""
        n, own = axis.size, axis.index
        rows = [whole.reshape(n, -1) for whole in wholes]
        if extra is not None:
            rows.append(extra.expand(n, -1))
        report_collective("reduce_scatter", axis, self.plan, wholes[0], op)
        rest = torch.cat([rows[i] for i in self._small], 1) if self._small else rows[0].new_empty((n, 0))
        outgoing = [[*(rows[i][rank] for i in self._large), rest[rank]] for rank in range(n)]
        received = rest.new_empty((1 if n == 2 else n, self.plan.own_size))
        arrived = torch.empty_like(rest)
        sections = [section.split_with_sizes(self._splits) for section in received.unbind()]
        into = [sections[0] if n == 2 else sections[rank] for rank in range(n)]
        incoming = [[*(into[rank][i] for i in self._large), arrived[rank]] for rank in range(n)]
        works = exchange(axis, outgoing, incoming, tag)
        mine = [(i, rows[i][own]) for i in self._large]

        def of_two() -> Tensor:
            join = mean_of_two if op == "avg" else Tensor.add_
            for i, whole in mine:
                join(sections[0][i], whole)
            if self._small:
                parts = join(arrived[1 - own], rest[own]).split_with_sizes(self._small_splits)
                torch._foreach_copy_([sections[0][i] for i in self._small], list(parts))
            return received[0]

        def of_many() -> Tensor:
            arrived[own].copy_(rest[own])
            for i, whole in mine:
                sections[own][i].copy_(whole)
            if self._small:
                for i, part in zip(self._small, arrived.split_with_sizes(self._small_splits, 1), strict=True):
                    torch._foreach_copy_([section[i] for section in sections], list(part.unbind()))
            return received.mean(0) if op == "avg" else received.sum(0, dtype=received.dtype)

        return Pending("reduce_scatter", axis, works, received, of_two if n == 2 else of_many)
