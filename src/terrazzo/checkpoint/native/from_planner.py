"""Tensors that planners hand out, to write and to read into: they must have memory of their own."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.checkpoint.native.memory import fault_of
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner, WriteItem
from terrazzo.errors import CheckpointError, UnsupportedValueError


def target_of(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """What the planner's `resolve_tensor` returns for an item; raises an error if it has no memory."""
    target = planner.resolve_tensor(item).detach()
    if target.is_meta:
        raise on_meta(item.dest_index.fqn)
    fault = fault_of(target)
    if fault:
        raise UnsupportedValueError(f"{item.dest_index.fqn!r}: what the planner's resolve_tensor returned: {fault}")
    return target


def data_of(planner: SavePlanner, item: WriteItem) -> Any:
    """What the planner's `resolve_data` returns for an item; raises an error for a tensor without memory."""
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        fault = fault_of(data)
        if fault:
            raise UnsupportedValueError(f"{item.index.fqn!r}: what the planner's resolve_data returned: {fault}")
    return data


def on_meta(name: str) -> CheckpointError:
    """The error for a target without memory."""
    return CheckpointError(
        f"{name!r} is on the meta device, which holds no values; give it memory first, or load with a planner whose "
        f"resolve_tensor does"
    )
