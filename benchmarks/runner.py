"""Runs cases on local ranks of `terrazzo.testing`: on the CPU, which communicate through gloo over loopback, or with an
accelerator each.

The cases of one module and world run in the same processes, one after the other; the next module gets new ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import cases, devices
from benchmarks.cases import Case, Setting
from benchmarks.measure import measure
from benchmarks.report import Result, failure_of, result_of
from terrazzo.testing import RanksFailed, close_all, run_ranks

CASE_LIMIT = 900.0  # seconds for one case, so that a run ends if ranks wait for each other for ever
CASE_SECONDS = 60.0  # after which a case takes no more samples than it needs


def run(
    chosen: Iterable[Case],
    *,
    quick: bool = False,
    limit: float = CASE_LIMIT,
    seconds: float = CASE_SECONDS,
    device: str = "cpu",
    began: Callable[[Case], None] = lambda case: None,
) -> Iterator[Result]:
    """Runs the cases, by module and world, and yields their results as they come. `began` is called before each.

    If a case fails, or has not finished after `limit` seconds, its result says so, and the ones after it get new
    processes. After `seconds` a case takes no more samples than it needs. `device` is the kind of device.
    """
    if device != "cpu":
        several = devices.count(device)
        chosen = [replace(case, world=several if case.world > 1 else 1, budget=None) for case in chosen]

    def together(case: Case) -> tuple[str, int]:
        return case.module, case.world

    for _, group in groupby(sorted(chosen, key=together), key=together):
        close_all()
        try:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                for case in group:
                    began(case)
                    try:
                        of_ranks = run_ranks(
                            case.world, _measure, case.module, case.name, folder, quick, seconds, device, timeout=limit
                        )
                        yield result_of(case, of_ranks[0])
                    except RanksFailed as failure:
                        yield failure_of(case, str(failure))
        finally:
            close_all()


def _measure(module: str, name: str, folder: str, quick: bool, seconds: float, device: str) -> dict[str, list[float]]:
    """On each rank: the samples of a case."""
    here = torch.device(device) if device == "cpu" else devices.join(device)
    cases.load([module])
    case = cases.get(name)
    own = Path(folder, name)
    own.mkdir(exist_ok=True)
    return measure(case, Setting(dist.get_rank(), dist.get_world_size(), own, quick, here), seconds)
