"""`torch.masked.var` and `std` without a mask count elements in a plain tensor; with a mask of the input's kind they
count in a DTensor."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.masked import _ops

from terrazzo.tensor.dtensor import DTensor


def install() -> None:
    """Give them such a mask."""
    _ops._std_var = _with_mask(_ops._std_var)


def _with_mask(std_var: Any) -> Any:
    @functools.wraps(std_var)
    def run(input: Any, *args: Any, mask: Any = None, **options: Any) -> Any:
        if mask is None and isinstance(input, DTensor):
            mask = torch.ones_like(input, dtype=torch.bool)
        return std_var(input, *args, mask=mask, **options)

    return run
