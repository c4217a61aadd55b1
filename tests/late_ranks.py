"""Checks on the device `late`: each call has ranks of its own, as a process that has the device cannot lose it again.

from late_ranks import run_late

def check_copy(device):                      # at module level
    assert torch.ones(2, device=device).sum().item() == 2

def test_copies():
    run_late(2, check_copy)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranks import run_fresh
from terrazzo.errors import DeviceBuildError
from terrazzo.testing import late
from terrazzo.testing.late import build


@functools.cache
def _problem() -> str:
    """Why the device cannot be compiled here; empty if it is. Processes of the session compile it once."""
    try:
        build.built()
    except DeviceBuildError as error:
        return str(error).partition("\n")[0]
    return ""


def skip_without_late() -> None:
    """Skip the test where the device cannot be compiled."""
    if problem := _problem():
        pytest.skip(problem)


def run_late(
    world: int,
    *checks: Callable[..., Any],
    modes: tuple[str, ...] = ("needed",),
    seeds: tuple[int, ...] = (0,),
    backend_name: str = "late",
    timeout: float = 200,
) -> list[list[Any]]:
    """Call each check with this rank's device, in each mode and with each seed; a race fails it.

    Returns for each call what it returned on each rank. Where the device cannot be compiled, the test is skipped.
    """
    __tracebackhide__ = True
    skip_without_late()
    outcomes = run_fresh(world, _run, checks, modes, seeds, backend_name, timeout=timeout)
    bad = [str(outcome) for outcome in outcomes if not outcome.ok]
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)
    return [list(values) for values in zip(*(outcome.value for outcome in outcomes), strict=True)]


def _run(checks: Any, modes: Any, seeds: Any, backend_name: str) -> list[Any]:
    late.init(backend_name=backend_name)
    late.init_process_group()
    device = torch.device("late", torch.distributed.get_rank())
    torch.accelerator.set_device_index(device.index)
    values = []
    for check in checks:
        for mode in modes:
            for seed in seeds:
                with late.checked(mode, seed):
                    values.append(check(device))
    return values
