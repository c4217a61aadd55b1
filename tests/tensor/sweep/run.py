"""Sends the entries to four ranks in batches; an entry that hangs or kills a rank is found and becomes a finding."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence

from ranks import RanksFailed, run_ranks
from tests.tensor.sweep.cases import Case, Report
from tests.tensor.sweep.check import sweep_entries

Plan = Sequence[tuple[str, Sequence[Case]]]
Tell = Callable[[Sequence[Report]], None]


def run_plan(plan: Plan, *, batch: int = 12, seconds_per_entry: float = 30, tell: Tell | None = None) -> list[Report]:
    """The report of each entry, told as it comes.

    A batch that fails is run again entry by entry, to find the one that hangs.
    """
    reports: list[Report] = []
    for start in range(0, len(plan), batch):
        part = plan[start : start + batch]
        try:
            new = run_batch(part, seconds_per_entry * max(1, len(part) / 4))
        except RanksFailed:
            new = [_run_alone(one, seconds_per_entry) for one in part]
        reports += new
        if tell is not None:
            tell(new)
            counts = {v: sum(r.verdict == v for r in reports) for v in ("right", "raises", "wrong", "skipped")}
            print(f"{len(reports)}/{len(plan)} {part[-1][0]}: {counts}", file=sys.stderr, flush=True)
    return reports


def run_batch(part: Plan, timeout: float) -> list[Report]:
    """The reports of some entries, from four ranks that agree."""
    with contextlib.redirect_stdout(io.StringIO()):  # what ranks say of errors is in the reports too
        everywhere = run_ranks(4, sweep_entries, part, timeout=timeout)
    return [_joined(list(reports)) for reports in zip(*everywhere, strict=True)]


def _run_alone(one: tuple[str, Sequence[Case]], seconds: float) -> Report:
    try:
        return run_batch([one], seconds)[0]
    except RanksFailed as failure:
        # The last lines that a rank printed say which case it was and what became of it there.
        said = [line for line in str(failure).splitlines() if line.startswith(f"{one[0]}, ")]
        report = Report(one[0])
        report.wrong.append(("", f"hangs or crashes: {said[-1] if said else str(failure)[:2000]}"))
        return report


def _joined(reports: list[Report]) -> Report:
    """The report of a rank that saw the most: verdicts are agreed, messages may differ."""
    return max(reports, key=lambda r: sum(len(m) for _, m in r.wrong) + sum(len(m) for _, m in r.raises))
