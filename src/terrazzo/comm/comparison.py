"""Comparing numbers between ranks without any rank waiting for another.

Each comparison of a series has a number: that of a round, and that within the round. The first rank that comes to it
leaves its value in the store of the default process group; every later one finds that and compares. So one that comes
late, or never, holds up nobody, and ranks that ask for different collectives are no danger. The price: it is not the
first rank that learns of a difference, but those behind it; the first one learns at its next comparison, from a mark
that they leave.

What a rank asks of the store takes one thread and a connection of its own. A store that is gone (the process that hosts
it has ended, and so has the job) compares nothing.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from terrazzo._torch.groups import default_group, default_store

_asking = ThreadPoolExecutor(1, thread_name_prefix="terrazzo-comparison")


class Difference(NamedTuple):
    """Two global ranks whose values differ in a comparison."""

    number: tuple[int, int]
    rank: int
    other: int


class Comparison:
    """A series of comparisons among `ranks`, of which this process is one; each rank makes them in the same order."""

    def __init__(self, store: Store, prefix: str, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._prefix = prefix
        self._size = len(ranks)
        self._rank = rank
        self._number = (0, 0)
        self._reported = (0, 0)  # the last comparison of which this rank knows that it showed a difference

    @classmethod
    def among(cls, ranks: Sequence[int], name: str) -> Comparison:
        """A series among global ranks of the default process group."""
        made = _made.setdefault(default_group(), Counter())
        who = hashlib.blake2b(repr((name, tuple(ranks))).encode(), digest_size=12).hexdigest()
        made[who] += 1
        default: Any = default_store()  # torch's stubs lack clone
        store = default.clone()
        return cls(store, f"terrazzo/comparison/{who}/{made[who]}", ranks, dist.get_rank())

    def start(self, value: int, new_round: bool = False) -> Future[Difference | None]:
        """Compare `value`; the result is there soon, for it takes an answer of the store, not of other ranks.

        What ranks have compared more or less often than others in a round does not matter to the next.
        """
        self._number = (self._number[0] + 1, 0) if new_round else (self._number[0], self._number[1] + 1)
        return _asking.submit(self._compare, self._number, value)

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


# How often a series of a name was made of the same ranks: a store remembers the keys of old ones.
_made: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
