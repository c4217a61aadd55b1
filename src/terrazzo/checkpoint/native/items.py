"""PyTorch's items, where saves and loads meet them: as rows to write, and as targets to read into.

PyTorch's readers call `resolve_tensor`, fill the tensor and call `commit_tensor` before they go on to the next one, so
a planner may keep in between what it needs at the end. Tensors of such a planner are read into memory first; it is
asked for the target when all bytes are there (`InPairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import torch

from terrazzo.checkpoint.native.dtypes import as_bytes, can_convert
from terrazzo.checkpoint.native.memory import empty, fault_of
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


_AT_ONCE: Final = 32 << 20  # bytes of the tensors that are in memory together


class InPairs:
    """Hands out targets for the items of a plan, and tells the planner when they are full.

    `dtype_of` knows as what an item is stored. A planner whose class has a method `fills_in_any_order` that returns
    True is asked for its own targets at once.
    """

    def __init__(self, planner: LoadPlanner, dtype_of: Callable[[ReadItem], torch.dtype]) -> None:
        own: Any = getattr(type(planner), "fills_in_any_order", None)  # of its class: it may delegate to another
        self._planner = planner
        self._dtype_of = dtype_of
        self._any_order = own is not None and bool(own(planner))

    def groups(self, items: Sequence[ReadItem]) -> Iterator[Sequence[ReadItem]]:
        """The items, as many at a time as should be read together."""
        if self._any_order:
            yield items
            return
        group: list[ReadItem] = []
        total = 0
        for item in items:
            nbytes = prod(item.lengths) * self._dtype_of(item).itemsize
            if group and total + nbytes > _AT_ONCE:
                yield group
                group, total = [], 0
            group.append(item)
            total += nbytes
        if group:
            yield group

    def target(self, item: ReadItem) -> torch.Tensor:
        """What to read the elements of an item into."""
        if self._any_order:
            return self._resolved(item)
        return empty(item.storage_index.fqn, tuple(item.lengths), self._dtype_of(item))

    def filled(self, item: ReadItem, target: torch.Tensor) -> None:
        """The target of an item has its elements."""
        if not self._any_order:
            read, target = target, self._resolved(item)
            if not can_convert(read.dtype, target.dtype):
                raise CheckpointError(
                    f"{item.dest_index.fqn!r}: torch cannot convert the checkpoint's {read.dtype} to {target.dtype}, "
                    f"the dtype of what the planner's resolve_tensor returned"
                )
            as_bytes(target).copy_(as_bytes(read))
        self._planner.commit_tensor(item, target)

    def _resolved(self, item: ReadItem) -> torch.Tensor:
        target = target_of(self._planner, item)
        if target.shape != tuple(item.lengths):
            raise CheckpointError(
                f"{item.dest_index.fqn!r}: the planner's resolve_tensor returned a tensor of shape "
                f"{list(target.shape)} for {list(item.lengths)}"
            )
        return target
