"""What a rank reads of a checkpoint of terrazzo's format: straight from its root.

Nearly every tensor has the shape and dtype that were saved, and mostly is cut as it was; then no more is made of it
than the target itself. What does not fit is left to the planner, which knows what to say of it.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.checkpoint.native.chunks import Overlap, place_in_grid
from terrazzo.checkpoint.native.dtypes import dtype_from_name
from terrazzo.checkpoint.native.overlaps import Overlaps, complete_parts, whole_chunk
from terrazzo.checkpoint.native.plans import Target
from terrazzo.checkpoint.native.root import TENSOR, Root, StoredTensor
from terrazzo.checkpoint.plan.sharded import Viewer, is_sharded, plain_chunk
from terrazzo.layout.box import Box


class RootTargets:
    """Targets for tensors of a state dict."""

    def __init__(self, root: Root, viewer: Viewer, overlaps: Overlaps) -> None:
        self._root = root
        self._viewer = viewer
        self._overlaps = overlaps
        self._tensors = root.tensors
        self._sharded: dict[type[Any], bool] = {}  # types of tensors
        self._dtypes: dict[str, torch.dtype] = {}
        self._owned = [len(owners) for owners in root.owner_tables]
        # By the box itself, which targets keep alive: the layout and shape that it is of, and what it needs there.
        self._parts: dict[int, tuple[int, tuple[int, ...], tuple[Overlap, ...]]] = {}

    def add(self, name: str, value: Any, targets: list[Target]) -> bool:
        """Add the targets of a value; not if it is no tensor that has the shape and dtype of the stored one."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.kind != TENSOR:
            return False
        kind = type(value)
        sharded = self._sharded.get(kind)
        if sharded is None:
            if not (is_sharded(value) or isinstance(value, torch.Tensor)):
                return False
            sharded = self._sharded[kind] = is_sharded(value)
        dtype = self._dtypes.get(tensor.dtype)
        if dtype is None:
            dtype = self._dtypes[tensor.dtype] = dtype_from_name(tensor.dtype)
        if value.dtype is not dtype or value.size() != tensor.shape:
            return False
        only = self._viewer.only_chunk(name, value) if sharded else None
        if only is not None:
            _, box, local, _ = only
            targets.append(Target(name, name, local, box, self._parts_of(tensor, box)))
            return True
        if not sharded:
            box, local = plain_chunk(name, value)
            targets.append(Target(name, name, local, box, self._parts_of(tensor, box)))
            return True
        for number, (box, local) in enumerate(self._viewer.view(name, value).chunks):
            targets.append(Target(name, name, local, box, self._parts_of(tensor, box), number))
        return True

    def _parts_of(self, tensor: StoredTensor, box: Box) -> tuple[Overlap, ...]:
        layout, shape = tensor.layout, tensor.shape
        known = self._parts.get(id(box))
        if known is not None and known[0] == layout and known[1] == shape:
            return known[2]
        steps = self._root.head.layouts[layout]
        number = -1
        if type(steps) is tuple and len(steps) == len(shape):
            number, count = place_in_grid(box, shape, steps)
            if count != self._owned[tensor.owners]:
                number = -1
        if number >= 0:
            parts: tuple[Overlap, ...] = (whole_chunk(number, box),)
        else:
            parts = complete_parts(tensor.name, box, self._overlaps.of(self._root.chunks(tensor), box))
        self._parts[id(box)] = layout, shape, parts
        return parts
