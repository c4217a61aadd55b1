"""Statements that the fuzzer leaves out, because they are known to be at fault. The aim is an empty list."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    (r"\bnp\.", "numpy's numbers and arrays as indices"),
    (r"\[\[\]", "an empty list as an index"),
    (r"torch\.int32\)", "writes through a view of another dtype are lost"),
    (r"dropout\(", "is no alias where it does nothing; of bools it gives int64"),
)
"""Pattern of a statement, and what goes wrong."""


def is_known(step: str) -> bool:
    return any(re.search(pattern, step) for pattern, _ in KNOWN)
