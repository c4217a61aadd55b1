"""Measures one case on one rank: implementations take turns, and a sample is as long as the slowest rank took."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases import OURS, Case, Prepared, Setting

QUICK_REPETITIONS = 3
SAMPLE_SECONDS = 0.005  # long against the clock, short against what disturbs a machine
MAX_CALLS = 100_000
LONG_CALL = 1.0  # seconds of a call that need not be warmed up again
FEWEST = 3  # samples of each, however long they take


def measure(case: Case, setting: Setting, seconds: float = math.inf) -> dict[str, list[float]]:
    """The samples of every implementation, in the order in which they were taken; equal on all ranks.

    After `seconds` no more are taken than the fewest that make a median.
    """
    began = time.monotonic()
    implementations = case.function(setting)
    runs = {name: i.run if isinstance(i, Prepared) else i for name, i in implementations.items()}
    prepare = {name: i.before if isinstance(i, Prepared) else _nothing for name, i in implementations.items()}
    timed = case.unit == "s"
    device = setting.device
    calls: dict[str, int] = {}
    for name in runs:
        try:
            calls[name] = _calls_per_sample(runs[name], device) if timed and prepare[name] is _nothing else 1
        except NotImplementedError:  # as of operations that PyTorch's DTensor has on some devices only
            if name == OURS:
                raise
    names = list(calls)
    repetitions = min(QUICK_REPETITIONS, case.repetitions) if setting.quick else case.repetitions
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # so that collecting before every sample takes no time
    try:
        for repetition in range(repetitions):
            turn = repetition % len(names)
            for name in names[turn:] + names[:turn]:
                prepare[name]()
                sample = _time(runs[name], calls[name], device) if timed else _value(runs[name])
                samples[name].append(sample)
            if math.isfinite(seconds) and repetition + 1 >= FEWEST:
                if _slowest_rank([time.monotonic() - began])[0] > seconds:
                    break
    finally:
        gc.unfreeze()
    return {name: _slowest_rank(values) for name, values in samples.items()}


def _nothing() -> None:
    pass


def _calls_per_sample(run: Callable[[], object], device: torch.device) -> int:
    """How many calls make a sample, the same number on every rank. Also warms up."""
    calls = 1
    for _ in range(3):  # the first call may build what later ones find
        seconds = _slowest_rank([_time(run, calls, device)])[0]
        if seconds > LONG_CALL:
            break
        calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9))))
    return calls


def _time(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of one call, averaged over several, from a moment at which all ranks are there; what an accelerator does
    for them is a part of it."""
    gc.collect()
    gc.disable()
    try:
        _meet()
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize(device)
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def _value(run: Callable[[], object]) -> float:
    _meet()
    value = run()
    if not isinstance(value, int | float):
        raise TypeError(f"an implementation of a case that is not timed returns its sample, not {type(value).__name__}")
    return float(value)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _meet() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def _slowest_rank(values: list[float]) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [float(value) for value in shared]


def extra_memory(work: Callable[[], object]) -> float:
    """The most memory, in MB, that this process had during `work` beyond what it had before."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    work()
    return max(0.0, (_status("VmHWM") - before) / 1e6)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
