"""PyTorch's items and what planners hand out for them, to write and to read into: it must have memory of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from terrazzo.checkpoint.native.memory import fault_of
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.root import RAW, TYPED
from terrazzo.checkpoint.native.rows import Form, Row, form_of, object_row
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box


def target_of(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """What the planner's `resolve_tensor` returns for an item; raises an error if it has no memory."""
    target = planner.resolve_tensor(item).detach()
    if target.is_meta:
        raise on_meta(item.dest_index.fqn)
    fault = fault_of(target)
    if fault:
        raise UnsupportedValueError(f"{item.dest_index.fqn!r}: what the planner's resolve_tensor returned: {fault}")
    return target


def rows_of(plan: SavePlan, planner: SavePlanner) -> list[Row]:
    """PyTorch's items as rows; the planner is asked for the data of a tensor when it is written."""
    tied_to = getattr(planner, "tied_to", None)
    # Many items share one description; the plan keeps it alive, and with it its id.
    forms: dict[int, Form] = {}
    rows = []
    for item in plan.items:
        name = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            rows.append(object_row(name, *_payload(planner, item)))
            continue
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{name!r}: an item of type {item.type} needs tensor_data")
        form = forms.get(id(data))
        if form is None:
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            form = forms[id(data)] = form_of(data.properties.dtype, tuple(data.size), box)
        tied = None if tied_to is None else tied_to(item.index)
        rows.append(Row(name, form, key=item.index, tied=tied, source=partial(data_of, planner, item)))
    return rows


def _payload(planner: SavePlanner, item: WriteItem) -> tuple[int, bytes | ObjectBytes]:
    data = planner.resolve_data(item)
    if isinstance(data, ObjectBytes):
        return TYPED, data
    if isinstance(data, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn!r}: the plan promised bytes, but the planner's resolve_data gave a tensor"
        )
    return RAW, data.getvalue()


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
