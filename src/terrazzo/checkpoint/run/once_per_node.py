"""Read what several ranks of a node need only once, and send it to the others.

Ranks with the same values (data-parallel replicas, the replicas of HSDP) need the same bytes of a store. If the store
is slower than the network inside the node, one rank reads them and sends them to the others:

    1. ranks exchange what they need: a hash of each box of a stored chunk and of its target's dtype and shape
    2. each box that several ranks need is assigned to one of them, with balanced bytes; all compute the same
    3. each rank reads what is assigned to it, and what only it needs, directly into its tensors
    4. it sends the others what they need, in pieces of bounded size

Errors are exchanged with all ranks of the load between the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo

from terrazzo._torch.groups import default_store
from terrazzo.checkpoint.native.rows import ReadPlan, Target
from terrazzo.checkpoint.native.tensors import as_bytes
from terrazzo.layout.box import row_major_windows

_PIECE: Final = 32 << 20  # bytes that are sent at once
_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class Passed:
    """What one rank reads for others: ranks as indices on the node, parts of targets as indices in this rank's
    plan."""

    reader: int
    receivers: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


def _shareable(targets: Sequence[Target]) -> dict[tuple[int, int], tuple[tuple[int, int], int]]:
    """The parts that other ranks may need, too, with their bytes, by a hash of 128 bits."""
    found: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    for number, target in enumerate(targets):
        dtype = target.tensor.dtype
        for place, part in enumerate(target.parts):
            about = (target.source, part.chunk.offsets, part.in_chunk, part.lengths, str(dtype))
            key = divmod(xxhash.xxh3_128_intdigest(repr(about).encode()), 1 << 64)
            found.setdefault(key, ((number, place), prod(part.lengths) * dtype.itemsize))
    return found


def assigned(wanted: Sequence[np.ndarray[Any, Any]]) -> list[tuple[tuple[int, int], int, tuple[int, ...]]]:
    """For each hash that several ranks need: the rank that reads it, and those that receive it.

    `wanted` has a table for each rank, with a row for each hash: its two halves, and the number of bytes.

    >>> tables = [np.array([[0, 7, 100], [0, 8, 40], [0, 9, 40]]), np.array([[0, 7, 100], [0, 8, 40]])]
    >>> assigned(tables)
    [((0, 7), 0, (1,)), ((0, 8), 1, (0,))]
    """
    rows = np.concatenate(wanted)
    ranks = np.repeat(np.arange(len(wanted)), [len(table) for table in wanted])
    order = np.lexsort((ranks, rows[:, 1], rows[:, 0]))
    rows, ranks = rows[order], ranks[order]
    firsts = np.nonzero(np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(axis=1)))[0][: len(rows)]
    ends = np.append(firsts[1:], len(rows))[: len(firsts)]
    several = np.nonzero(ends - firsts > 1)[0]
    loads = [0] * len(wanted)
    largest_first = several[np.argsort(-rows[firsts[several], 2].astype(np.int64), kind="stable")]
    found = []
    for place in largest_first.tolist():
        holders = ranks[firsts[place] : ends[place]].tolist()
        high, low, nbytes = rows[firsts[place]].tolist()
        reader = min(holders, key=lambda rank: (loads[rank], rank))
        loads[reader] += nbytes
        found.append(((high, low), reader, tuple(rank for rank in holders if rank != reader)))
    return found


class Node:
    """The ranks of this node that load together, with a process group of their own."""

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        """`ranks` are global ranks. All of them construct one at the same time, with a new name: with a used name gloo
        would find old addresses."""
        self._size = len(ranks)
        self._position = list(ranks).index(dist.get_rank())
        self._timeout = timeout
        self._gloo: Any = None
        if self._size > 1:
            store = PrefixStore(f"terrazzo/node/{name}/{ranks[0]}", default_store())
            self._gloo = ProcessGroupGloo(store, self._position, self._size, timeout)

    def close(self) -> None:
        """Close the connections."""
        self._gloo = None

    def agree(self, targets: Sequence[Target]) -> list[Passed]:
        """What this rank sends to and receives from others."""
        if self._gloo is None:
            return []
        own = _shareable(targets)
        table = np.array([(*key, nbytes) for key, (_, nbytes) in own.items()], dtype=np.uint64).reshape(-1, 3)
        found: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        for key, reader, receivers in assigned(self._gathered(table)):
            if self._position == reader or self._position in receivers:
                found[reader, receivers].append(own[key][0])
        return [Passed(reader, receivers, tuple(found[reader, receivers])) for reader, receivers in sorted(found)]

    def own_part(self, plan: ReadPlan, passed: Sequence[Passed]) -> ReadPlan:
        """This rank's plan, without what other ranks will send."""
        others: dict[int, set[int]] = defaultdict(set)
        for each in passed:
            if each.reader != self._position:
                for number, place in each.parts:
                    others[number].add(place)
        kept = []
        for number, target in enumerate(plan.targets):
            if number in others:
                left = tuple(part for place, part in enumerate(target.parts) if place not in others[number])
                if left:
                    kept.append(msgspec.structs.replace(target, parts=left))
            else:
                kept.append(target)
        return ReadPlan(kept, plan.values)

    def pass_on(self, targets: Sequence[Target], passed: Sequence[Passed]) -> None:
        """Send what this rank has read for others, and receive what they have read for it."""
        buffer = (
            torch.empty(_PIECE, dtype=torch.uint8, device="cpu")
            if passed
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        with torch.no_grad():
            for each in passed:  # in the same order on all ranks
                tensors = [targets[number].part(targets[number].parts[place]) for number, place in each.parts]
                for piece in _pieces(tensors):
                    self._exchange(each, piece, buffer)

    def _exchange(self, each: Passed, piece: list[torch.Tensor], buffer: torch.Tensor) -> None:
        views, used = [], 0
        for part in piece:
            views.append(buffer[used : used + part.nbytes].view(part.dtype).view(part.shape))
            used += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        sent = buffer[:used]
        if self._position == each.reader:
            for view, part in zip(views, piece, strict=True):
                view.copy_(part)
            for work in [self._gloo.send([sent], receiver, 0) for receiver in each.receivers]:
                work.wait(self._timeout)
            return
        self._gloo.recv([sent], each.reader, 0).wait(self._timeout)
        for view, part in zip(views, piece, strict=True):
            part.copy_(view)

    def _gathered(self, table: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The tables of all ranks of the node."""
        count = torch.tensor([len(table)], device="cpu")
        counts = [torch.zeros_like(count) for _ in range(self._size)]
        self._gloo.allgather([counts], [count]).wait(self._timeout)
        most = max(int(each) for each in counts)
        padded = torch.zeros(most, 3, dtype=torch.int64, device="cpu")
        padded[: len(table)] = torch.from_numpy(table.view(np.int64))
        received = [torch.empty_like(padded) for _ in range(self._size)]
        self._gloo.allgather([received], [padded]).wait(self._timeout)
        return [
            each[: int(size)].contiguous().numpy().view(np.uint64) for each, size in zip(received, counts, strict=True)
        ]


def _pieces(targets: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Views of the targets, in lists that fit into one buffer."""
    batch: list[torch.Tensor] = []
    used = 0
    for target in targets:
        whole = as_bytes(target)
        for window in row_major_windows(whole.shape, _PIECE // whole.dtype.itemsize):
            part = whole[window.slices()]
            room = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
            if used + room > _PIECE:
                yield batch
                batch, used = [], 0
            batch.append(part)
            used += room
    if batch:
        yield batch
