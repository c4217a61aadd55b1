"""Statements that the fuzzer leaves out, because they are known to be at fault. The aim is an empty list."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    # (pattern of a statement, what goes wrong)
)


def is_known(step: str) -> bool:
    return any(re.search(pattern, step) for pattern, _ in KNOWN)
