"""Attributes that scripts read from a parameter: whether it is sharded, and its whole size.

DTensors have them: parameters of stage 3, and those of other stages between the last backward and the step. So do
parameters that are created in `zero.Init`, until `initialize`.
"""

from __future__ import annotations

from enum import Enum
from itertools import count
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.leaves import is_leaf, leaves_in
from terrazzo.tensor import DTensor


class ZeroParamStatus(Enum):
    """Whether a rank holds the whole parameter; the value of `ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(model: nn.Module) -> None:
    """Set `ds_id`, `ds_shape`, `ds_numel` and `ds_status` of DTensor parameters, and `ds_z3_leaf_module` in leaves."""
    for number, parameter in enumerate(model.parameters()):
        if isinstance(parameter, DTensor):
            _set(parameter, number, ZeroParamStatus.NOT_AVAILABLE)
    for leaf in [model] if is_leaf(model) else leaves_in(model):
        for owned in leaf.parameters():
            owned.ds_z3_leaf_module = leaf  # type: ignore[attr-defined]


_created = count()


def mark_as_created(parameter: Tensor | None) -> None:
    """Set the attributes of a parameter that is created in `zero.Init`, and is whole until `initialize`."""
    if parameter is not None and not hasattr(parameter, "ds_id"):
        _set(parameter, next(_created), ZeroParamStatus.AVAILABLE)


def mark_as_whole(whole: Tensor, parameter: Tensor) -> None:
    """Set the same attributes of the whole tensor of a gathered parameter, if the parameter has them."""
    number = getattr(parameter, "ds_id", None)
    if number is not None:
        _set(whole, number, ZeroParamStatus.AVAILABLE)


def _set(parameter: Any, number: int, status: ZeroParamStatus) -> None:
    parameter.ds_id, parameter.ds_status = number, status
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
    parameter.ds_persist = False  # none is left whole because it is small
