"""The two collectives of fully_shard: those of `terrazzo.comm`, but large ones on CPU are messages between pairs of
ranks.

For large ones that is quicker: parts are received where they belong, what a rank keeps does not travel, and no step
waits for another.  And a message has a tag, here that of the parameters it is about, so ranks that took different
paths wait for each other, and are told so, where gloo would end the process because sizes differ.  For small ones what
counts is that gloo's threads do the work while the caller goes on.

Among very many ranks nothing is done rank by rank, on any device: sections are alike, or if that would take much more
memory, each rank puts its own in its place among zeros and all are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import repeat
from terrazzo.comm.collectives import all_gather_start, all_reduce_start, gather_into, reduce_scatter_start
from terrazzo.comm.pending import Pending, wait_for
from terrazzo.fsdp.run.flat import FlatPlan, has_many

FIRST_TAG = 1 << 30  # below are those of users' own messages

_SMALL = 4 << 20  # bytes of all sections together

_BITS = {4: torch.int32, 8: torch.int64}  # integers that backends add, by their size


class _Messages:
    """Several messages under way, waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_gather(part: Tensor, axis: Axis, plan: FlatPlan, tag: int, careful: bool = False) -> Pending[Tensor]:
    """Begin to collect the sections of all ranks, one after the other; `part` is this rank's.

    `careful` sends small ones as messages too: it is not known yet that ranks agree about what comes next.
    """
    n = axis.size
    if n == 1:
        return Pending("all_gather", axis, None, part)
    small = plan.total * part.element_size() <= _SMALL and not careful
    if axis.device_type == "cpu" and not has_many(n) and not small:
        _report("all_gather", axis, plan, part, None)
        return _gather_by_messages(part, axis, plan.sizes, tag)
    if plan.ragged:
        _report("all_gather", axis, plan, part, None)
        return _gather_by_sum(part, axis, plan)
    if plan.alike:
        _report("all_gather", axis, plan, part, None)
        out = part.new_empty(plan.total)
        if axis.device_type == "cpu" and has_many(n) and small:  # gloo's all-gather has a step for each rank
            work = wire.all_to_all(axis, out, repeat(part, n))
        else:
            work = gather_into(axis, out, part)
        return Pending("all_gather", axis, work, out)
    return all_gather_start(part, axis, 0, plan.sizes)


def start_reduce(sections: Tensor, axis: Axis, plan: FlatPlan, op: str, tag: int) -> Pending[Tensor]:
    """Begin to reduce flat `sections`, each to the rank that it is for; `op` is sum or avg."""
    n = axis.size
    if n > 1 and axis.device_type == "cpu" and not has_many(n) and sections.nbytes > _SMALL:
        _report("reduce_scatter", axis, plan, sections, op)
        return _reduce_by_messages(sections, axis, plan.sizes, op, tag)
    if plan.ragged:
        everything = all_reduce_start(sections, axis, op)
        first, last = plan.own_start, plan.own_start + plan.own_size
        return Pending("reduce_scatter", axis, None, sections, lambda: everything.wait()[first:last].clone())
    return reduce_scatter_start(sections, axis, 0, plan.sizes, op)


def _report(kind: str, axis: Axis, plan: FlatPlan, tensor: Tensor, op: str | None) -> None:
    if observe.observers:
        observe.report(kind, axis, plan.moved(tensor.element_size()), op, True)


def _gather_by_sum(part: Tensor, axis: Axis, plan: FlatPlan) -> Pending[Tensor]:
    """Each rank writes its section in its place among zeros, and bits are added: only one rank has any there."""
    out = part.new_zeros(plan.total)
    out[plan.own_start : plan.own_start + plan.own_size] = part
    bits = out.view(_BITS.get(part.element_size(), torch.uint8))
    return Pending("all_gather", axis, wire.all_reduce(axis, bits, "sum"), out)


# ------------------------------------------------------------------ messages between pairs of ranks


class MessageGather(Pending[Tensor]):
    """A gather whose result lacks this rank's own part, until somebody wants it there: who unpacks it need not."""

    __slots__ = ("part",)

    def __init__(self, axis: Axis, works: _Messages, out: Tensor, part: Tensor, own: Tensor) -> None:
        # waited for like a single piece of work
        super().__init__("all_gather", axis, works, out, self._complete(out, part, own))  # type: ignore[arg-type]
        self.part = part

    @staticmethod
    def _complete(out: Tensor, part: Tensor, own: Tensor) -> Callable[[], Tensor]:
        def finish() -> Tensor:
            own.copy_(part)
            return out

        return finish

    def of_others(self) -> Tensor:
        """The result, as soon as it is there, with anything in the place of this rank's part, which is `part`."""
        if self._work is not None:
            wait_for(self._work, self.kind, self.axis)
            self._work = None
        return self._result


def _gather_by_messages(part: Tensor, axis: Axis, sizes: Sequence[int], tag: int) -> Pending[Tensor]:
    out = part.new_empty(sum(sizes))
    chunks = out.split_with_sizes(list(sizes))
    works = _exchange(axis, [part] * axis.size, chunks, tag)
    return MessageGather(axis, works, out, part, chunks[axis.index])


def _reduce_by_messages(sections: Tensor, axis: Axis, sizes: Sequence[int], op: str, tag: int) -> Pending[Tensor]:
    n, own = axis.size, axis.index
    parts = sections.split_with_sizes(list(sizes))
    mine = parts[own]
    if n == 2:
        other = torch.empty_like(mine)
        works = _exchange(axis, parts, [other, other], tag)
        return Pending("reduce_scatter", axis, works, other, lambda: _sum_of_two(other, mine, op))  # type: ignore[arg-type]
    received = mine.new_empty((n, sizes[own]))
    rows = received.unbind()
    works = _exchange(axis, parts, rows, tag)
    rows[own].copy_(mine)

    def finish() -> Tensor:
        return received.mean(0) if op == "avg" else received.sum(0, dtype=received.dtype)

    return Pending("reduce_scatter", axis, works, received, finish)  # type: ignore[arg-type]


def _sum_of_two(other: Tensor, mine: Tensor, op: str) -> Tensor:
    other.add_(mine)
    return other.mul_(0.5) if op == "avg" else other


def _exchange(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> _Messages:
    """Send and receive one message per other rank; empty ones stay away."""
    n, own = axis.size, axis.index
    works = []
    for distance in range(1, n):  # each rank begins with its neighbour, so that not all send to the same
        source = (own - distance) % n
        if incoming[source].numel():
            works.append(wire.receive(axis, incoming[source], source, tag))
        target = (own + distance) % n
        if outgoing[target].numel():
            works.append(wire.send(axis, outgoing[target], target, tag))
    return _Messages(works)
