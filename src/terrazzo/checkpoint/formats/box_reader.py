"""A reader that reads one box of a tensor after the other: what most formats of other systems need."""

from __future__ import annotations

import abc
import os
from typing import Any

import torch

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.items import target_of
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.plain_reader import PlainReader
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointFormatError
from terrazzo.layout.box import Box


class BoxReader(PlainReader):
    """A reader that reads one box of a tensor after the other, on each rank what that rank needs.

    Subclasses say what there is (`read_metadata`), and read boxes of tensors (`read_box`) and other values (`value`).

    Args:
        path: Where the checkpoint is; `load(checkpoint_id=...)` names another place.
    """

    plans_alone = True

    def __init__(self, path: str | os.PathLike[str] | Place | Store) -> None:
        self.place = path if isinstance(path, Place) else Place(path)
        self.bytes_read = 0

    @abc.abstractmethod
    def read_box(self, name: str, box: Box, target: torch.Tensor) -> int:
        """Fill `target` with a box of a tensor; returns the bytes that were read.

        `target` has the box's shape; its device and dtype may be others than the stored tensor's. The box lies in one
        of the chunks that the metadata list.
        """

    def value(self, name: str) -> Any:
        """A value that is not a tensor."""
        raise CheckpointFormatError(f"{self.place} has no {name!r} that is not a tensor")

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.place.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.bytes_read = 0
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing: each rank has read the metadata."""

    def _carry_out(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            name, start = item.storage_index.fqn, item.storage_index.offset
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, ObjectBytes(self.value(name)))
                continue
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            target = target_of(planner, item)
            if target.shape != box.lengths:
                raise CheckpointFormatError(
                    f"{name}: the planner returned a tensor of shape {tuple(target.shape)} for a box of shape "
                    f"{box.lengths}"
                )
            self.bytes_read += self.read_box(name, box if start is None else box.shifted(tuple(start)), target)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).exists()
