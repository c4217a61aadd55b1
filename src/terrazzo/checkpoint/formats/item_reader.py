"""A reader that reads one item after the other: what most formats of other systems need."""

from __future__ import annotations

import abc
import os

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.plain_reader import PlainReader
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from terrazzo.checkpoint.stores import Place


class ItemReader(PlainReader):
    """A reader that reads one item after the other, on each rank what that rank needs.

    Subclasses say what there is (`read_metadata`) and read an item (`read_item`).

    Args:
        path: Where the checkpoint is; `load(checkpoint_id=...)` names another place.
    """

    plans_alone = True

    def __init__(self, path: str | os.PathLike[str] | Place) -> None:
        self.place = path if isinstance(path, Place) else Place(path)
        self.bytes_read = 0

    @abc.abstractmethod
    def read_item(self, item: ReadItem, planner: LoadPlanner) -> int:
        """Give the planner the tensor or the value that an item asks for; the bytes that were read.

        A tensor is read into `planner.resolve_tensor(item)`, and then given to `planner.commit_tensor`; a value
        is given to `planner.load_bytes`, as an `ObjectBytes`.
        """

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
            self.bytes_read += self.read_item(item, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).exists()
