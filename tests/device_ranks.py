"""Checks on accelerators: what is marked `gpu` runs with `pytest --device cuda`, or with `--device late` on the device
that imitates one. `make gpu` does this, and writes a report.

from device_ranks import run_on_devices

@pytest.mark.gpu
def test_copies():
    run_on_devices(check_copy)      # check_copy(device) at module level, as for run_late

Each device has a rank, which is kept until the session ends. The default group is for the CPU and the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import devices
from terrazzo import testing
from terrazzo.testing import late

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
