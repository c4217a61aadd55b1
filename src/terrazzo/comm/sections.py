"""All-gather and reduce-scatter of the sections of a `FlatPlan`; on CPU large ones are messages between pairs of ranks.

For large sections messages are faster: parts are received directly into their buffers, a rank's own part is not sent,
and no step waits for another. A message has a tag, that of its parameters. If ranks run different modules, they wait
for each other and get an error, whereas gloo would end the process because sizes differ. For small sections collectives
are faster, because gloo's threads do the work while the caller goes on.

With very many ranks there is no work for each rank, on any device: either all sections have equal length; or, if that
took much more memory, each rank writes its section into a buffer of zeros, and all buffers are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import repeat
from terrazzo.comm.collectives import all_gather_start, all_reduce_start, gather_into, reduce_scatter_start
from terrazzo.comm.flat import FlatPlan, has_many
from terrazzo.comm.pending import Pending

FIRST_TAG = 1 << 30  # lower tags are left to users

_SMALL = 2 << 20  # bytes of all sections together

_BITS = {4: torch.int32, 8: torch.int64}  # integer dtypes that backends can add, by size


class Messages:
    """Several started messages, with the interface of one `Work`."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_gather(
    part: Tensor, axis: Axis, plan: FlatPlan, tag: int, careful: bool = False, like: Tensor | None = None
) -> Pending[Tensor]:
    """Start to gather the sections of all ranks, one after the other; `part` is this rank's.

    With `careful`, small sections are messages, too, because ranks may be about to call different collectives. The
    result has the dtype and device of `like`, or of `part`. On accelerators what has to be copied for that is copied to
    its place among the sections, and gathered there.
    """
    n = axis.size
    if like is not None and not _is_alike(part, like):
        if n > 1 and plan.alike and axis.device_type != "cpu":
            report_collective("all_gather", axis, plan, like, None)
            out = like.new_empty(plan.total)
            return Pending("all_gather", axis, wire.all_gather(axis, out, place(part, out, plan)), out)
        part = converted(part, like)
    if n == 1:
        return Pending("all_gather", axis, None, part)
    small = plan.total * part.element_size() <= _SMALL and not careful
    if axis.device_type == "cpu" and not has_many(n) and not small:
        report_collective("all_gather", axis, plan, part, None)
        return _gather_by_messages(part, axis, plan.sizes, tag)
    if plan.ragged:
        report_collective("all_gather", axis, plan, part, None)
        return _gather_by_sum(part, axis, plan)
    if plan.alike:
        report_collective("all_gather", axis, plan, part, None)
        out = part.new_empty(plan.total)
        if axis.device_type == "cpu" and has_many(n) and small:  # gloo's all-gather has a step for each rank
            work = wire.all_to_all(axis, out, repeat(part, n))
        else:
            work = gather_into(axis, out, part)
        return Pending("all_gather", axis, work, out)
    return all_gather_start(part, axis, 0, plan.sizes)


def place(part: Tensor, sections: Tensor, plan: FlatPlan) -> Tensor:
    """A copy of this rank's section in its place among all; it may come from another device, or have another dtype."""
    if part.dtype is not sections.dtype:  # copied first and converted there, where that is quick
        part = part.to(sections.device, non_blocking=True)
    return sections.narrow(0, plan.own_start, plan.own_size).copy_(part, non_blocking=True)


def converted(part: Tensor, like: Tensor) -> Tensor:
    """A section on the device, and in the dtype, of `like`."""
    return part.to(like.device, non_blocking=True).to(like.dtype)


def _is_alike(part: Tensor, like: Tensor) -> bool:
    return part.dtype is like.dtype and part.device == like.device


def start_reduce(sections: Tensor, axis: Axis, plan: FlatPlan, op: str | wire.ScaledSum, tag: int) -> Pending[Tensor]:
    """Start to reduce flat `sections`, each to its rank; `op` is sum, avg or, if sections have equal length and the
    backend has it, a scaled sum."""
    if not isinstance(op, str):
        report_collective("reduce_scatter", axis, plan, sections, "sum")
        reduced = sections.new_empty(plan.own_size)
        return Pending("reduce_scatter", axis, wire.reduce_scatter(axis, reduced, sections, op), reduced)
    if goes_by_messages(axis, sections.nbytes):
        report_collective("reduce_scatter", axis, plan, sections, op)
        return _reduce_by_messages(sections, axis, plan.sizes, op, tag)
    if plan.ragged:
        everything = all_reduce_start(sections, axis, op)
        first, last = plan.own_start, plan.own_start + plan.own_size
        return Pending("reduce_scatter", axis, None, sections, lambda: everything.wait()[first:last].clone())
    return reduce_scatter_start(sections, axis, 0, plan.sizes, op)


def goes_by_messages(axis: Axis, nbytes: int) -> bool:
    """Whether sections of so many bytes in all are sent as messages between pairs of ranks."""
    return axis.size > 1 and axis.device_type == "cpu" and not has_many(axis.size) and nbytes > _SMALL


def report_collective(kind: str, axis: Axis, plan: FlatPlan, tensor: Tensor, op: str | None) -> None:
    """Report a collective of this plan to observers."""
    if observe.observers:
        observe.report(kind, axis, plan.moved(tensor.element_size()), op, True)


def _gather_by_sum(part: Tensor, axis: Axis, plan: FlatPlan) -> Pending[Tensor]:
    """Gather by adding: each rank writes its section into zeros, and the buffers are added as integers."""
    out = part.new_zeros(plan.total)
    out[plan.own_start : plan.own_start + plan.own_size] = part
    bits = out.view(_BITS.get(part.element_size(), torch.uint8))
    return Pending("all_gather", axis, wire.all_reduce(axis, bits, "sum"), out)


# ------------------------------------------------------------------ messages between pairs of ranks


def _gather_by_messages(part: Tensor, axis: Axis, sizes: Sequence[int], tag: int) -> Pending[Tensor]:
    out = part.new_empty(sum(sizes))
    chunks = out.split_with_sizes(list(sizes))
    works = exchange(axis, [[part]] * axis.size, [[chunk] for chunk in chunks], tag)
    chunks[axis.index].copy_(part)
    return Pending("all_gather", axis, works, out)


def _reduce_by_messages(sections: Tensor, axis: Axis, sizes: Sequence[int], op: str, tag: int) -> Pending[Tensor]:
    n, own = axis.size, axis.index
    parts = sections.split_with_sizes(list(sizes))
    mine = parts[own]
    if n == 2:
        other = torch.empty_like(mine)
        works = exchange(axis, [[each] for each in parts], [[other], [other]], tag)
        return Pending("reduce_scatter", axis, works, other, lambda: _sum_of_two(other, mine, op))
    received = mine.new_empty((n, sizes[own]))
    rows = received.unbind()
    works = exchange(axis, [[each] for each in parts], [[row] for row in rows], tag)
    rows[own].copy_(mine)

    def finish() -> Tensor:
        return received.mean(0) if op == "avg" else received.sum(0, dtype=received.dtype)

    return Pending("reduce_scatter", axis, works, received, finish)


def _sum_of_two(other: Tensor, mine: Tensor, op: str) -> Tensor:
    return mean_of_two(other, mine) if op == "avg" else other.add_(mine)


def mean_of_two(other: Tensor, mine: Tensor) -> Tensor:
    """Write the mean into `other`; both are flat.

    Large gradients are read from memory, so it counts how often: a sum and a division would read and write `other`
    twice. The product with one is the only operation of PyTorch that adds two tensors with a factor for each in one
    pass. Halves are exact, so the result is that of a sum that is divided.
    """
    if other.dtype is torch.float16:  # the sum may overflow, and halves of its smallest numbers are not exact
        return other.copy_(other.float().add_(mine).mul_(0.5))
    other.view(1, -1).addr_(mine.new_ones(1), mine, beta=0.5, alpha=0.5)
    return other


def exchange(
    axis: Axis, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], tag: int
) -> Messages:
    """Send each other rank its messages, and receive its messages, in the same order. Empty ones are not sent."""
    n, own = axis.size, axis.index
    works = []
    for distance in range(1, n):  # each rank begins with its neighbour, so that not all ranks send to the same one
        source = (own - distance) % n
        works += [wire.receive(axis, one, source, tag) for one in incoming[source] if one.numel()]
        target = (own + distance) % n
        works += [wire.send(axis, one, target, tag) for one in outgoing[target] if one.numel()]
    return Messages(works)
