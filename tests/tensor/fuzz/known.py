"""Statements that the fuzzer leaves out, because they are known to be at fault. The aim is an empty list."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    # (pattern of a statement, what goes wrong)
    (r"\b\w+\((input|self)=", "the first argument given by name raises IndexError"),
    (
        r"\.to\(|\.type_as\(|\.cpu\(|dropout\(|contiguous\(|resolve_\w+\(",
        "gives a copy where one device gives the same tensor",
    ),
    (r"torch\.int32|as_strided", "gives a copy of a view, or takes the strides of one"),
    (r"torch\.tensor\(-?\d+\)[],]", "an index tensor without dims is an int, which gives a view"),
    (
        r"(flatten|squeeze|ravel|reshape|float|view_as)\(.*\.(t|transpose|swapaxes|squeeze|unsqueeze)_\(",
        "not the same object",
    ),
    (r"out=", "tensors that require gradients are written to, floats are truncated"),
    (r"np\.", "arrays and empty lists as indices"),
    (r"no_grad\(\): .*\.(t|transpose|swapaxes|squeeze|unsqueeze)_\(", "the new shape forgets requires_grad"),
)


def is_known(step: str) -> bool:
    return any(re.search(pattern, step) for pattern, _ in KNOWN)
