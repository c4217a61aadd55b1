"""Every entry of PyTorch's op database, distributed: the part of the sweep that fits the suite's budget.

`python -m tests.tensor.sweep` runs all of it; what it found last is docs/op-sweep.md.
"""

from __future__ import annotations

import pytest

from tests.tensor.sweep.plan import short_plan
from tests.tensor.sweep.run import run_plan
from tests.tensor.sweep.samples import entries

PARTS = 8

# Entries that raise instead of giving a result, with what they say; every other entry must be right.
RAISES: dict[str, str] = {}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_is_right(part):
    names = list(entries())[part::PARTS]
    reports = run_plan([(name, short_plan(name)) for name in names], batch=len(names), seconds_per_entry=4)
    problems = [
        f"{r.name}: {r.wrong[:2] or r.raises[:2]}" for r in reports if r.wrong or (r.raises and r.name not in RAISES)
    ]
    assert not problems, "\n".join(problems)
    assert all(r.verdict != "skipped" for r in reports)
