"""The two collectives of fully_shard: those of `terrazzo.comm`, but large ones on CPU are messages between pairs of
ranks.

For large ones that is quicker: parts are received where they belong, what a rank keeps does not travel, and no step
waits for another.  And a message has a tag, here that of the parameters it is about, so ranks that took different
paths wait for each other, and are told so, where gloo would end the process because sizes differ.  For small ones what
counts is that gloo's threads do the work while the caller goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import all_gather_start, reduce_scatter_start
from terrazzo.comm.pending import Pending

FIRST_TAG = 1 << 30  # below are those of users' own messages

_SMALL = 4 << 20  # bytes of all parts together


class _Messages:
    """Several messages under way, waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_gather(part: Tensor, axis: Axis, sizes: Sequence[int], tag: int, careful: bool = False) -> Pending[Tensor]:
    """Begin to collect the flat parts of all ranks, of the given sizes, one after the other.

    `careful` sends small ones as messages too: it is not known yet that ranks agree about what comes next.
    """
    n, own = axis.size, axis.index
    nbytes = sum(sizes) * part.element_size()
    small = nbytes <= _SMALL and not careful
    if n == 1 or small or axis.device_type != "cpu":
        return all_gather_start(part, axis, 0, sizes)
    if observe.observers:
        observe.report("all_gather", axis, (n - 1) * nbytes // n, None, True)
    out = part.new_empty(sum(sizes))
    chunks = out.split_with_sizes(list(sizes))
    works = _exchange(axis, [part] * n, chunks, tag)
    chunks[own].copy_(part)
    return Pending("all_gather", axis, works, out)  # type: ignore[arg-type]  # waited for like one


def start_reduce(buffers: Tensor, axis: Axis, sizes: Sequence[int], op: str, tag: int) -> Pending[Tensor]:
    """Begin to reduce flat `buffers`, whose part i of size `sizes[i]` belongs to rank i; `op` is sum or avg."""
    n, own = axis.size, axis.index
    if n == 1 or buffers.nbytes <= _SMALL or axis.device_type != "cpu":
        return reduce_scatter_start(buffers, axis, 0, sizes, op)
    if observe.observers:
        observe.report("reduce_scatter", axis, (n - 1) * buffers.nbytes // n, op, True)
    parts = buffers.split_with_sizes(list(sizes))
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
