"""Checks of index values, where each rank only looks up its own part.

An index that is in no rank's part would give zero on every rank, so the sum would be a wrong but plausible number.
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
        return  # while a graph is captured there are no values to check
    inside = ((values >= 0) & (values < count)).all()
    if values.device.type != "cpu":
        assert_async(inside, f"{what} out of bounds")
    elif not inside:
        wrong = values[(values < 0) | (values >= count)]
        raise IndexError(f"{what} {wrong.flatten()[0].item()} is out of bounds: there are {count}")
