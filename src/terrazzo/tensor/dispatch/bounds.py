"""Bounds of index values, where each rank only looks for its own.

An index that no rank owns would be a zero on every rank, and their sum a plausible number.
"""

from __future__ import annotations

import torch

from terrazzo._torch.tensors import assert_async
from terrazzo.comm.captured import capturing


def check_bounds(values: torch.Tensor, count: int, what: str) -> None:
    """Raise for values outside [0, count); on an accelerator through an assertion that needs no synchronisation.

    >>> check_bounds(torch.tensor([0, 3]), 3, "target")
    Traceback (most recent call last):
    IndexError: target 3 is out of bounds: there are 3
    """
    if capturing():
        return  # a graph has no values to look at
    inside = ((values >= 0) & (values < count)).all()
    if values.device.type != "cpu":
        assert_async(inside, f"{what} out of bounds")
    elif not inside:
        wrong = values[(values < 0) | (values >= count)]
        raise IndexError(f"{what} {wrong.flatten()[0].item()} is out of bounds: there are {count}")
