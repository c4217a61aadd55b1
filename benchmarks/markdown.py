"""The page of measured figures: one section a topic, replaced when that topic is measured again."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.report import Report, Result, columns_of

_HEAD = """# Benchmarks

Terrazzo beside PyTorch and plain tensors, taking turns in one process, sample by sample; medians, and the ratios of
samples taken together. How cases are written and what the columns mean is said in `benchmarks/__init__.py`. Budgets are
ratios, because absolute times are this machine's. Each section says when and where it was measured, and this page is
written by the command that it shows.
"""


def update_page(path: Path, report: Report, today: datetime.date) -> None:
    """Write the report's topics into the page, leaving the others as they are."""
    sections = _sections(path.read_text()) if path.exists() else {}
    for topic, results in groupby(report.results, key=lambda r: r.name.partition(".")[0]):
        sections[topic] = _section(topic, list(results), report, today)
    path.write_text("\n".join([_HEAD, *(sections[topic] for topic in sorted(sections))]))


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (\S+)\n", text, flags=re.MULTILINE)[1:]
    return {topic: f"## {topic}\n{body.rstrip()}\n" for topic, body in zip(parts[::2], parts[1::2], strict=True)}


def _section(topic: str, results: list[Result], report: Report, today: datetime.date) -> str:
    machine = report.machine
    where = (
        f"{today.isoformat()}, PyTorch {machine.torch}, Python {machine.python}, {machine.cores} cores of "
        f"{machine.processor}: `python -m benchmarks {topic} --page docs/benchmarks.md`"
    )
    return "\n".join([f"## {topic}", "", where, "", *table(columns_of(results)), ""])


def table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a table: title -> cells."""
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)),
    ]
