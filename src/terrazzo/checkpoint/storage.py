"""The interface between checkpoints and where their bytes live.

A `StorageWriter` carries out save plans and a `StorageReader` load plans.  Names and the order of calls are those
of `torch.distributed.checkpoint.storage`.  To keep bytes somewhere new, subclass these two; to keep terrazzo's
own format somewhere new, a `terrazzo.checkpoint.stores.Store` is enough.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from terrazzo.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner


@dataclass(frozen=True, slots=True)
class WriteResult:
    """One item that has been written."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(abc.ABC):
    """Writes checkpoints.

    `save` makes these calls, in this order: `reset`, `set_up_storage_writer` and `prepare_local_plan` on every rank,
    `prepare_global_plan` on the coordinator, `write_data` on every rank, `finish` on the coordinator.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new checkpoint begins, under this id if one was given to `save`."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Learn whether this rank coordinates."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adapt this rank's plan to the storage, preferably by filling `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adapt the plans of all ranks, in one place."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every item of the plan; its data comes from `planner.resolve_data`."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        """Every rank has written: make the checkpoint valid."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can write under this id."""

    def storage_meta(self) -> StorageMeta | None:
        """What planners may want to know about this storage."""
        return None


class StorageReader(abc.ABC):
    """Reads checkpoints.

    `load` makes these calls, in this order: `reset`, `read_metadata`, `set_up_storage_reader` and
    `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `read_data` on every rank.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new checkpoint is about to be read, under this id if one was given to `load`."""

    @abc.abstractmethod
    def read_metadata(self) -> Metadata:
        """The checkpoint's table of contents."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Learn the metadata and whether this rank coordinates."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adapt this rank's plan to the storage, preferably by filling `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Adapt the plans of all ranks, in one place."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into what the planner hands out, across devices where need be."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can read what lies under this id."""
