"""Statements that the fuzzer leaves out, because they are known to be at fault. The aim is an empty list."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    (r"torch\.int32\)|as_strided|is_contiguous", "views of another dtype and strides are those of each rank's part"),
    (r"dropout\(", "is no alias where it does nothing"),
    (r"copy=True", "is an alias"),
    (r"(flatten|ravel)\(|torch\.detach\(", "another object, or a copied view that is one no more"),
    (r"_grad\(\): .*\b(squeeze|unsqueeze|t|transpose|swapaxes)_\(", "requires_grad is forgotten"),
    (r"detach_\(", "of what was transposed in place"),
)
"""Pattern of a statement, and what goes wrong."""


def is_known(step: str) -> bool:
    return any(re.search(pattern, step) for pattern, _ in KNOWN)
