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
import sys
from collections.abc import Callable
from typing import Any

# Ranks share few cores with this process: this has to be said before torch and numpy start threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

from terrazzo import testing
from terrazzo.testing import Outcome, RanksFailed, preload
from terrazzo.testing.pool import in_order_of_failure

__all__ = [
    "WORLDS",
    "Outcome",
    "RanksFailed",
    "close_all",
    "device_type",
    "fresh_values",
    "preload",
    "run_fresh",
    "run_ranks",
]

WORLDS = (1, 2, 4)
"""Each keeps its processes until the session ends, so there are few."""

preload("rank_preload")

on_late = False
"""Whether the present test runs its checks on the device `late`. `late_ranks` knows how."""
on_accelerators = False
"""Whether it runs them on this machine's accelerators. `device_ranks` knows how."""


def device_type() -> str:
    """In a check: the type of the device that it runs on, for meshes."""
    return torch.get_default_device().type


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """`terrazzo.testing.run_ranks`, for these worlds."""
    __tracebackhide__ = True
    if on_late:
        import late_ranks

        return late_ranks.run_on(world, fn, args, timeout)
    if on_accelerators:
        import device_ranks

        return device_ranks.run_on(world, fn, args, timeout)
    if world not in WORLDS:
        raise ValueError(f"run_ranks serves worlds {WORLDS}, not {world}; run_fresh takes any")
    return testing.run_ranks(world, fn, *args, timeout=timeout)


def run_fresh(world: int, fn: Callable[..., Any], *args: Any, **more: Any) -> list[Outcome]:
    """`terrazzo.testing.run_fresh`."""
    __tracebackhide__ = True
    if on_late:
        import late_ranks

        return late_ranks.fresh_on(world, fn, args, **more)
    if on_accelerators:
        import device_ranks

        return device_ranks.fresh_on(world, fn, args, **more)
    return testing.run_fresh(world, fn, *args, **more)


def fresh_values(world: int, fn: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    """What `fn` returned on new ranks. If one failed, the error shows all of them, the one that failed first first."""
    __tracebackhide__ = True
    outcomes = run_fresh(world, fn, *args, **more)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed("\n".join([f"in {fn.__qualname__}:", *map(str, in_order_of_failure(outcomes))]))
    return [outcome.value for outcome in outcomes]


def close_all() -> None:
    """End all ranks that were kept."""
    testing.close_all()
    if late_ranks := sys.modules.get("late_ranks"):
        late_ranks.close_all()
