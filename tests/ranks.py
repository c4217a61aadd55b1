"""The ranks of these tests: those of `terrazzo.testing`, in worlds of 1, 2 and 4, with what many tests import.

from ranks import run_ranks

def check_sum(scale):
    x = torch.ones(2) * scale
    dist.all_reduce(x)
    return x.sum().item()

def test_sum():
    assert run_ranks(2, check_sum, 3.0) == [12.0, 12.0]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# Ranks share few cores with this process: this has to be said before torch and numpy start threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from terrazzo import testing
from terrazzo.testing import Outcome, RanksFailed, close_all, preload, run_fresh

__all__ = ["WORLDS", "Outcome", "RanksFailed", "close_all", "preload", "run_fresh", "run_ranks"]

WORLDS = (1, 2, 4)
"""Each keeps its processes until the session ends, so there are few."""

preload("rank_preload")


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`terrazzo.testing.run_ranks`, for these worlds."""
    __tracebackhide__ = True
    if world not in WORLDS:
        raise ValueError(f"run_ranks serves worlds {WORLDS}, not {world}; run_fresh takes any")
    return testing.run_ranks(world, fn, *args, timeout=timeout)
