"""Checks on accelerators: what is marked `gpu` runs with `pytest --device cuda`, or with `--device late` on the device
that imitates one. `make gpu` does this, and writes a report.

from device_ranks import run_on_devices

@pytest.mark.gpu
def test_copies():
    run_on_devices(check_copy)      # check_copy(device) at module level, as for run_late

Each device has a rank, which is kept until the session ends. The default group is for the CPU and the devices.

With `--long` there, the checks of tests marked `on_late` run on the devices too, in worlds that these have ranks for
(`RANKS_PER_DEVICE`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from benchmarks import devices
from terrazzo import testing
from terrazzo.testing import Outcome, late
from terrazzo.testing.process import Request

_chosen: str | None = None


def choose(kind: str | None) -> None:
    """The device type for this session."""
    global _chosen
    _chosen = kind


def run_on_devices(check: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """Call `check(device, *args)` on each rank, and return what the ranks returned; on `late`, a race fails it."""
    __tracebackhide__ = True
    assert _chosen is not None, "tests that use devices are marked `gpu`"
    return testing.run_ranks(devices.count(_chosen), _run, _chosen, check, args, timeout=timeout)


def _run(kind: str, check: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device = devices.join(kind)
    if kind != devices.LATE:
        value = check(device, *args)
        torch.accelerator.synchronize()
        return value
    with late.checked("needed"):
        return check(device, *args)


# ------------------------------------------------------------------ checks of tests marked `on_late`


def run_on(world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    """Call `fn(*args)` on each of `world` ranks, as `ranks.run_ranks` does, where new tensors are on the devices."""
    __tracebackhide__ = True
    _need(world)
    return testing.run_ranks(world, _call, _chosen, Request.of(fn, args), timeout=timeout)


def fresh_on(world: int, fn: Callable[..., Any], args: tuple[Any, ...], **more: Any) -> list[Outcome]:
    """The same on new ranks, as `run_fresh` does."""
    _need(world)
    return testing.run_fresh(world, _call, _chosen, Request.of(fn, args), **more)


def _need(world: int) -> None:
    assert _chosen is not None
    if world > (there := devices.count(_chosen)):
        pytest.skip(f"{world} ranks, and the devices here have {there}")


def _call(kind: str, request: Request) -> Any:
    from late_ranks import OnDevice

    device = devices.join(kind)
    with OnDevice(device):
        torch.manual_seed(1234)
        value = request.call()
        torch.accelerator.synchronize()
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, value)
