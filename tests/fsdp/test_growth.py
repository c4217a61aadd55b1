"""One rank's step among thousands: what the host does, and what memory it takes, is what it is among eight."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fsdp_scale import simulated_step
from ranks import run_fresh
from terrazzo.fsdp import fully_shard, report

FEW, MANY = 8, 4096


class _Largest(TorchDispatchMode):
    """The most bytes that any tensor has which an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return result


def _calls(function: Any) -> int:
    """How many functions `function` calls, those of C included."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def play(world: int, width: int, rank: int) -> tuple[int, int, int]:
    """Calls of a step, the largest tensor in it, and what `report` says of the peak."""
    model, step = simulated_step(fully_shard, width, world, rank)
    for _ in range(3):
        step()
    calls = _calls(step)
    with _Largest() as largest:
        step()
    return calls, largest.nbytes, report(model).peak


# Dividing, not dividing, and a rank that has a part of everything.
CASES = [(4096, 2049), (4097, 2049), (4097, 0)]


def measure() -> list[list[tuple[int, int, int]]]:
    return [[play(FEW, width, 3), play(MANY, width, rank)] for width, rank in CASES]


def test_a_step_among_thousands_costs_the_host_what_it_costs_among_eight():
    found = run_fresh(1, measure)[0].value
    for (width, _), [(few, _, _), (many, largest, peak)] in zip(CASES, found, strict=True):
        # Chunks that divide are copied in one call, others in two, and go in a message of their own. A loop over ranks
        # would be thousands.
        assert many <= 1.5 * few
        parameters = 4 * (16 * width + width)  # of one layer, in bytes
        table = 8 * MANY * 4  # a few words for each rank
        assert largest <= 2 * parameters + table
        assert peak <= 8 * parameters + 2 * table
