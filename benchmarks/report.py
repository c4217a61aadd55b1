"""What was measured, said in numbers that can be compared: medians, ratios, budgets, as a table and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

import msgspec
import torch
from rich.table import Table
from rich.text import Text

from benchmarks.cases import OURS, Budget, Case

_PREFIXES = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


class Result(msgspec.Struct, frozen=True):
    """One case: its samples and what follows from them. A ratio is absent if an implementation that it needs is."""

    name: str
    world: int
    unit: str
    samples: dict[str, list[float]]
    medians: dict[str, float]
    ratios: dict[str, float]  # ours over each other implementation's
    overhead: float | None  # ours over plain, relative to torch's over plain
    budget: Budget | None
    measured: float | None  # what the budget is about
    kept: bool | None
    error: str | None = None


class Machine(msgspec.Struct, frozen=True):
    processor: str
    cores: int
    system: str
    python: str
    torch: str


class Report(msgspec.Struct, frozen=True):
    machine: Machine
    quick: bool
    results: list[Result]


def result_of(case: Case, samples: Mapping[str, Sequence[float]]) -> Result:
    """Ratios are medians over repetitions: what disturbs a repetition disturbs all that take turns in it."""
    ours = samples.get(OURS)
    ratios = {
        name: median(a / b for a, b in zip(ours, theirs, strict=True))
        for name, theirs in samples.items()
        if ours is not None and name != OURS and min(theirs) > 0
    }
    overhead = _overhead(samples)
    budget = case.budget
    measured = None
    if budget is not None and ours is not None:
        if budget.measure == "value":
            measured = median(ours)
        elif budget.measure == "overhead":
            measured = overhead
        elif budget.of in ratios:
            measured = ratios[budget.of] if budget.measure == "time" else 1 / ratios[budget.of]
    return Result(
        name=case.name,
        world=case.world,
        unit=case.unit,
        samples={name: list(values) for name, values in samples.items()},
        medians={name: median(values) for name, values in samples.items()},
        ratios=ratios,
        overhead=overhead,
        budget=budget,
        measured=measured,
        kept=budget.kept(measured) if budget is not None and measured is not None else None,
    )


def failure_of(case: Case, error: str) -> Result:
    """The result of a case that could not be measured."""
    return msgspec.structs.replace(result_of(case, {}), error=error)


def _overhead(samples: Mapping[str, Sequence[float]]) -> float | None:
    if not {OURS, "torch", "plain"} <= samples.keys():
        return None
    ours, theirs = (
        median(a - b for a, b in zip(samples[name], samples["plain"], strict=True)) for name in (OURS, "torch")
    )
    return ours / theirs if theirs > 0 else None


def tables(results: Iterable[Result]) -> list[Table]:
    """A table per topic."""
    return [_table(topic, list(group)) for topic, group in groupby(results, key=lambda r: r.name.partition(".")[0])]


def columns_of(results: Sequence[Result]) -> dict[str, list[str]]:
    """The table of one topic as text: title -> cells; columns without content are left out."""
    names = list(dict.fromkeys(name for result in results for name in result.medians))
    columns = {
        "case": [result.name.partition(".")[2] for result in results],
        "world": [str(result.world) for result in results],
        **{name: [_quantity(result.medians.get(name), result.unit) for result in results] for name in names},
        **{f"/ {name}": [_ratio(result.ratios.get(name)) for result in results] for name in names if name != OURS},
        "overhead": [_ratio(result.overhead) for result in results],
        "budget": [str(result.budget or "") for result in results],
        "kept": [_verdict(result) for result in results],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _table(topic: str, results: Sequence[Result]) -> Table:
    columns = columns_of(results)
    table = Table(title=topic)
    for title in columns:
        left = title in ("case", "budget", "kept")
        table.add_column(title, justify="left" if left else "right", no_wrap=title == "case")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell, _COLORS.get(cell.partition(":")[0], "")) for cell in row))
    return table


_COLORS = {"failed": "red", "over": "red", "ok": "green", "not measured": "yellow"}


def _verdict(result: Result) -> str:
    if result.error is not None:
        return "failed"
    if result.budget is None:
        return ""
    if result.kept is None:
        return "not measured"
    return "ok" if result.kept else f"over: {result.measured:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _quantity(value: float | None, unit: str) -> str:
    """A number with three digits and its unit; seconds as the part of a second that suits.

    >>> _quantity(0.00000365, "s"), _quantity(0.25, "s"), _quantity(61.0, "MB")
    ('3.65 us', '250 ms', '61 MB')
    """
    if value is None:
        return ""
    if unit != "s":
        return f"{value:.4g} {unit}"
    scale, prefix = next((p for p in _PREFIXES if abs(value) >= p[0]), _PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}s"


def report(results: Sequence[Result], *, quick: bool) -> Report:
    return Report(_machine(), quick, list(results))


def write_json(path: Path, report: Report) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
