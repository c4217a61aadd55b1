"""Every entry of PyTorch's op database, distributed: the part of the sweep that fits the suite's budget.

`python -m tests.tensor.sweep` runs all of it; what it found last is docs/op-sweep.md.
"""

from __future__ import annotations

import pytest

from tests.tensor.sweep.plan import other_form, short_plan
from tests.tensor.sweep.run import run_batch
from tests.tensor.sweep.samples import entries

PARTS = 8

# Entries that raise instead of giving a result, and why; every other one must be right.
RAISES = {
    "sparse.sampled_addmm": "a DTensor holds strided tensors",
    "sparse.mm.reduce": "a DTensor holds strided tensors",
    "resize_": "resize",  # has no meaning for a DTensor
}
# Known to be at fault: to become empty.
OPEN: dict[str, str] = {}
NEEDS_A_GPU = "jiterator_"


def check(part, plan, all_run):
    names = [name for name in entries() if not name.startswith(NEEDS_A_GPU)][part::PARTS]
    reports = run_batch([(name, cases) for name in names if (cases := plan(name))], timeout=240)
    problems = []
    for report in reports:
        if report.name in OPEN:
            continue
        expected = RAISES.get(report.name)
        unexpected = [r for r in report.raises if expected is None or expected not in r[1]]
        if report.wrong or unexpected or (all_run and report.verdict == "skipped"):
            problems.append(f"{report.name}: {report.verdict} {(report.wrong + unexpected)[:2]} {report.skipped}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_right(part):
    check(part, short_plan, all_run=True)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_right_in_another_form(part):
    check(part, other_form, all_run=False)  # of some entries one device does not take that form
