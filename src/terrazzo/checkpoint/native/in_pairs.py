"""Calls of a load planner for one tensor after the other, though several are read at once.

PyTorch's readers call `resolve_tensor`, fill the tensor and call `commit_tensor` before they go on to the next one, so
a planner may keep in between what it needs at the end. Tensors of such a planner are read into memory first; it is
asked for the target when all bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Final

import torch

from terrazzo.checkpoint.native.dtypes import as_bytes, can_convert
from terrazzo.checkpoint.native.from_planner import target_of
from terrazzo.checkpoint.native.memory import empty
from terrazzo.checkpoint.planner import LoadPlanner, ReadItem
from terrazzo.errors import CheckpointError

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
