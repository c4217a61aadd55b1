"""What scripts read off a parameter: that it is divided, and how large it is whole.

DeepSpeed's say so in stage 3.  Here they are distributed in every stage, and a script that gathers those that say so
gets whole ones in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch import Tensor

from terrazzo.tensor import DTensor


class ZeroParamStatus(Enum):
    """Whether a rank has all of a parameter, in its `ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(parameters: Iterable[Tensor]) -> None:
    """Give distributed parameters `ds_id`, `ds_shape`, `ds_numel` and `ds_status`."""
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            _set(parameter, number, ZeroParamStatus.NOT_AVAILABLE)


def mark_as_whole(whole: Tensor, parameter: Tensor) -> None:
    """Give what stands for a parameter while it is gathered the same, if the parameter has it."""
    number = getattr(parameter, "ds_id", None)
    if number is not None:
        _set(whole, number, ZeroParamStatus.AVAILABLE)


def _set(parameter: Any, number: int, status: ZeroParamStatus) -> None:
    parameter.ds_id, parameter.ds_status = number, status
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
