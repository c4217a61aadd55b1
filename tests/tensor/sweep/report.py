"""The sweep's results for people."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

import torch

from tests.tensor.sweep.cases import Report
from tests.tensor.sweep.forms import FORMS
from tests.tensor.sweep.samples import DTYPES


def show(reports: Sequence[Report], verbose: bool) -> None:
    for r in reports:
        if r.verdict != "right" or verbose:
            total = r.right + len(r.raises) + len(r.wrong)
            gathered = f", gathers {sorted(r.gathered)}" if r.gathered else ""
            print(f"{r.verdict:8s} {r.name} ({r.right} of {total} cases right{gathered}; skipped {r.skipped})")
        for label, findings in (("wrong", r.wrong), ("raises", r.raises)):
            for case, message in findings if verbose else findings[:1]:
                print(f"    {label}: {case}: {message}")


def counted(reports: Sequence[Report]) -> str:
    counts = {v: sum(r.verdict == v for r in reports) for v in ("right", "raises", "wrong", "skipped")}
    lines = [
        f"{len(reports)} entries: {counts}; {sum(bool(r.gathered) for r in reports)} gather; "
        f"{sum(r.right for r in reports)} cases right",
        *_by_dtype_and_form(reports),
    ]
    return "\n".join(lines)


def _by_dtype_and_form(reports: Sequence[Report]) -> list[str]:
    """A table of entries: right / raising / wrong ones of each dtype in each form."""
    lines = ["| | " + " | ".join(FORMS) + " |", "|---|" + "---|" * len(FORMS)]
    for dtype in DTYPES:
        row = []
        for form in FORMS:
            found = [r.cells[dtype, form].verdict for r in reports if (dtype, form) in r.cells]
            row.append(" / ".join(str(found.count(v)) for v in ("right", "raises", "wrong")) if found else "")
        lines.append(f"| {dtype} | " + " | ".join(row) + " |")
    return lines


def summary(reports: Sequence[Report], extent: str, arguments: str) -> str:
    """docs/op-sweep.md."""
    counts = {v: [r for r in reports if r.verdict == v] for v in ("right", "raises", "wrong", "skipped")}
    cases = sum(r.right for r in reports)
    idle = sum(r.verdict == "right" and not r.right for r in reports)
    kinds = {k: sum(k in r.kinds for r in reports) for k in ("replicate", "even", "uneven", "empty", "partial")}
    lines = [
        "# The sweep of PyTorch's op database",
        "",
        "Every entry of `torch.testing._internal.common_methods_invocations.op_db` on the CPU runs on four local "
        "ranks, for float32,",
        "float16, bfloat16, complex64, int64 and bool, as the database calls it, all by keywords, as a method or "
        "operator, with `out=`, and in place, on a",
        "one-dimensional mesh of 4 and on a 2 x 2 mesh, with its tensors replicated, sharded evenly, unevenly and "
        "with empty shards, as",
        "terms (of every reduction), and mixed. Values, shapes, dtypes and gradients (of a fixed random cotangent) are "
        "compared with one",
        "device of the same dtype, and where these differ with double precision. What is random must not depend on the "
        "placements.",
        "",
        "<!-- not run: takes many minutes; tests/tensor/test_sweep.py runs a part -->",
        "",
        "```sh",
        f"python -m tests.tensor.sweep{arguments} --write docs/op-sweep.md",
        "```",
        "",
        "writes this page. The test suite runs a part of it that meets every entry (`tests/tensor/test_sweep.py`).",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}; {extent}; "
        f"{cases} cases right.",
        "",
        "| entries | count | share |",
        "|---|---|---|",
    ]
    for verdict, text in (
        ("right", "right"),
        ("raises", "raise an error where one device does not"),
        ("wrong", "wrong, hang or crash"),
    ):
        n = len(counts[verdict])
        lines.append(f"| {text} | {n} | {n / max(len(reports) - len(counts['skipped']), 1):.1%} |")
    lines += [
        f"| cannot be run: one device raises, too | {len(counts['skipped'])} | |",
        f"| all | {len(reports)} | |",
        "",
        "Entries by dtype and form: right / raising an error / wrong.",
        "",
        *_by_dtype_and_form(reports),
        "",
        f"Of the right ones {idle} take no tensor (factories such as `arange`) and run as plain PyTorch; "
        f"{sum(r.random for r in reports)} are random. Entries whose tensors were met replicated: "
        f"{kinds['replicate']}, in even shards: {kinds['even']}, uneven: {kinds['uneven']}, with empty shards: "
        f"{kinds['empty']}, as terms: {kinds['partial']}. {sum(bool(r.gathered) for r in reports)} entries replicate "
        "an operand in at least one case, having no rule for it; the others never do.",
        "",
    ]
    for verdict, title in (("wrong", "Wrong"), ("raises", "Raise, and why"), ("skipped", "Not run, and why")):
        if counts[verdict]:
            lines += [f"## {title}", ""]
            for r in counts[verdict]:
                reasons = [f"{case}: {m}" for case, m in r.wrong + r.raises] or list(r.skipped)
                total = r.right + len(r.raises) + len(r.wrong)
                lines.append(f"- `{r.name}` ({total - r.right} of {total} cases): {'; '.join(reasons[:2])}")
            lines.append("")
    return "\n".join(lines)
