"""Comparing numbers between ranks without waiting for other ranks.

Each comparison has a number: that of its round, and that within the round. The first rank to make it writes its value
to the store of the default process group; every later rank reads that and compares. So a rank that is late, or that
never comes, delays nobody, and ranks that call different collectives cannot deadlock here. The price is that the first
rank does not see a difference at once: a later rank marks it in the store, and the first one reads that mark at its
next comparison.

The store is asked from a separate thread over a separate connection. If the store is gone (the process that hosts it
has ended, and so has the job), nothing is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import Store

from terrazzo._threads import Worker
from terrazzo._torch.groups import default_store
from terrazzo.comm.numbering import next_number

_asking = Worker("terrazzo-comparison")


class Difference(NamedTuple):
    """Two global ranks that gave different values in a comparison."""

    number: tuple[int, int]
    rank: int
    other: int


class Comparison:
    """A series of comparisons among `ranks`, which include this process; each rank makes them in the same order."""

    def __init__(self, store: Store, prefix: str, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._prefix = prefix
        self._size = len(ranks)
        self._rank = rank
        self._number = (0, 0)
        self._reported = (0, 0)  # the latest comparison for which this rank knows of a difference

    @classmethod
    def among(cls, ranks: Sequence[int], name: str) -> Comparison:
        """A series of comparisons among global ranks of the default process group."""
        who = hashlib.blake2b(repr((name, tuple(ranks))).encode(), digest_size=12).hexdigest()
        default: Any = default_store()  # torch's stubs lack clone
        store = default.clone()
        return cls(store, f"terrazzo/comparison/{who}/{next_number(who)}", ranks, dist.get_rank())

    def start(self, value: int, new_round: bool = False) -> Future[Difference | None]:
        """Compare `value`. The future waits for the store only, not for other ranks.

        A new round starts a new count: ranks that made different numbers of comparisons in one round agree in the next.
        """
        self._number = (self._number[0] + 1, 0) if new_round else (self._number[0], self._number[1] + 1)
        return _asking.submit(partial(self._compare, self._number, value))

    def _compare(self, number: tuple[int, int], value: int) -> Difference | None:
        try:
            return self._ask(number, value)
        except RuntimeError:  # the store's errors
            return None

    def _ask(self, number: tuple[int, int], value: int) -> Difference | None:
        key = f"{self._prefix}/{number[0]}.{number[1]}"
        count, mark = f"{key}/ranks", f"{self._prefix}/different"
        known, first = map(int, self._store.compare_set(key, "", f"{value} {self._rank}").split())
        if self._store.add(count, 1) == self._size:
            self._store.delete_key(key)
            self._store.delete_key(count)
        if known != value:
            self._reported = number
            self._store.set(mark, f"{number[0]} {number[1]} {first} {self._rank}")
            return Difference(number, first, self._rank)
        if self._store.check([mark]):
            turn, step, rank, other = map(int, self._store.get(mark).split())
            if (turn, step) > self._reported:
                self._reported = (turn, step)
                return Difference((turn, step), rank, other)
        return None
