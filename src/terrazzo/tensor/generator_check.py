"""A check that the random generators of a mesh's ranks have the same state.

If they do not (after `torch.manual_seed(rank)`, or a draw on one rank only), replicas would differ. So the ranks of a
mesh compare what they drew: at the first draw from a generator with a new seed, and every 256 draws. Only the first
comparison waits, for an answer of the store; no rank ever waits for another rank (`comm.comparison`). A difference that
a later comparison finds is raised by a draw after it.

What is compared is a digest of all keys and shapes since the last comparison, so that a difference in between is found
even if the states agree again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import ProcessGroup

from terrazzo._torch.groups import default_group
from terrazzo.comm.axis import axis_of, time_limit
from terrazzo.comm.comparison import Comparison, Difference
from terrazzo.comm.simulated import is_simulated, real_values
from terrazzo.errors import CommTimeout, RandomStateError

EVERY = 256
"""Draws on a mesh from one comparison to the next."""

_SEEDS = 64  # the most seeds that are remembered


class _Drawn:
    """Compares the draws of one set of ranks."""

    def __init__(self, comparison: Comparison, limit: float) -> None:
        self._comparison = comparison
        self._limit = limit  # seconds
        self._seeds: set[int] = set()
        self._draws = 0
        self._digest = 0
        self._started: deque[Future[Difference | None]] = deque()

    def drew(self, key: int, shape: tuple[int, ...], seed: int) -> None:
        self._digest = hash((self._digest, key, shape))
        self._draws += 1
        new = seed not in self._seeds
        if new:
            if len(self._seeds) >= _SEEDS:
                self._seeds.clear()
            self._seeds.add(seed)
            self._draws = 0
        if new or self._draws % EVERY == 0:
            self._started.append(self._comparison.start(self._digest, new))
            self._digest = 0
        while self._started and (new or self._started[0].done()):
            self._look(self._started.popleft())

    def _look(self, started: Future[Difference | None]) -> None:
        try:
            difference = started.result(self._limit)
        except TimeoutError as error:
            raise CommTimeout(
                f"comparing random generators: the store of the process group did not answer in {self._limit:g} s"
            ) from error
        if difference is not None:
            raise RandomStateError(
                f"the random generators of rank {difference.other} and rank {difference.rank} are not in the same "
                "state, so their parts of a random DTensor would not fit together. Call torch.manual_seed with the "
                "same value on every rank of the mesh, and use a separate torch.Generator for random numbers "
                "that differ between ranks (data loading)"
            )


# By default process group and ranks, and again by mesh for faster look-up. None: there are no other ranks.
_by_ranks: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], _Drawn]] = weakref.WeakKeyDictionary()
_by_mesh: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[ProcessGroup], _Drawn | None]] = weakref.WeakKeyDictionary()


def check_generators(mesh: Any, key: int, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
    """Record a draw for a tensor of this shape, and raise if earlier draws differed between ranks.

    Threads beside the main one draw from generators of their own in an order that differs between ranks, so these draws
    are not compared.
    """
    if generator is not None and threading.current_thread() is not threading.main_thread():
        return
    group = default_group()
    known = _by_mesh.get(mesh)
    if known is None or known[0]() is not group:
        known = _by_mesh[mesh] = weakref.ref(group), _check_of(mesh, group)
    if known[1] is not None:
        seed = (torch.default_generator if generator is None else generator).initial_seed()
        known[1].drew(key, shape, seed)


def _check_of(mesh: Any, group: ProcessGroup) -> _Drawn | None:
    if mesh.get_coordinate() is None or mesh.size() == 1 or is_simulated(group):
        return None
    with real_values():
        ranks = tuple(mesh.mesh.flatten().tolist())
    known = _by_ranks.setdefault(group, {})
    if ranks not in known:
        limit = time_limit(axis_of(mesh, next(d for d in range(mesh.ndim) if mesh.size(d) > 1)))
        known[ranks] = _Drawn(Comparison.among(ranks, "random"), limit.total_seconds())
    return known[ranks]
