"""Sends the entries to four ranks in batches; an entry that hangs or kills a rank is found and becomes a finding."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ranks import RanksFailed, run_ranks
from tests.tensor.sweep.check import Case, Report, sweep_entries

Plan = Sequence[tuple[str, Sequence[Case]]]


def run_plan(plan: Plan, *, batch: int = 12, seconds_per_entry: float = 30, progress: bool = False) -> list[Report]:
    reports: list[Report] = []
    for start in range(0, len(plan), batch):
        part = list(plan[start : start + batch])
        reports += _run_batch(part, seconds_per_entry)
        if progress:
            counts = {v: sum(r.verdict == v for r in reports) for v in ("right", "raises", "wrong", "skipped")}
            print(f"{len(reports)}/{len(plan)} {part[-1][0]}: {counts}", file=sys.stderr, flush=True)
    return reports


def _run_batch(part: list[tuple[str, Sequence[Case]]], seconds: float) -> list[Report]:
    try:
        everywhere = run_ranks(4, sweep_entries, part, timeout=seconds * max(1, len(part) / 4))
        return [_joined(list(reports)) for reports in zip(*everywhere, strict=True)]
    except RanksFailed as failure:
        if len(part) > 1:
            return [r for one in part for r in _run_batch([one], seconds)]
        report = Report(part[0][0])
        # The last lines that a rank printed say which case it was and what became of it there.
        said = [line for line in str(failure).splitlines() if line.startswith(f"{report.name}, ")]
        report.wrong.append(("", f"hangs or crashes: {said[-1] if said else str(failure)[:2000]}"))
        return [report]


def _joined(reports: list[Report]) -> Report:
    """The report of a rank that saw the most: verdicts are agreed, messages may differ."""
    return max(reports, key=lambda r: sum(len(m) for _, m in r.wrong) + sum(len(m) for _, m in r.raises))
