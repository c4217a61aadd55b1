"""The interface of storage writers and readers.

A `StorageWriter` carries out save plans, a `StorageReader` load plans. Names and the order of calls are those of
`torch.distributed.checkpoint.storage`. Subclass them for another format; to keep terrazzo's format in another kind of
store, write a `terrazzo.checkpoint.stores.Store` instead, which is less work.
"""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.futures import Future

from terrazzo.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from terrazzo.layout.drawing import ShownAsCall

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of writing one item."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(ShownAsCall, abc.ABC):
    """Writes checkpoints.

    `save` makes these calls, in this order: `reset`, `set_up_storage_writer` and `prepare_local_plan` on every rank,
    `prepare_global_plan` on the coordinator, `write_data` on every rank, `finish` on the coordinator.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called before each save, with `save`'s checkpoint id if it has one."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called with whether this rank is the coordinator; with `rank` and `use_collectives` if it takes `kwargs`."""

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
        """Commit the checkpoint. Called when every rank has written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can write under this id; by default not: it has to be given."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Information about this storage for planners."""
        return None


class StorageReader(ShownAsCall, abc.ABC):
    """Reads checkpoints.

    `load` makes these calls, in this order: `reset`, `read_metadata`, `set_up_storage_reader` and
    `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `read_data` on every rank.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called before each load, with `load`'s checkpoint id if it has one."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called with the metadata and whether this rank is the coordinator."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adapt this rank's plan to the storage, preferably by filling `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Adapt the plans of all ranks, in one place."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into the planner's tensors, which may be on other devices."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this class can read a checkpoint with this id; by default not: it has to be given."""
        return False


def with_kwargs(method: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """`more` if a method of a storage takes `kwargs`, as in newer versions of PyTorch; else nothing."""
    return more if "kwargs" in inspect.signature(method).parameters else {}


def done(result: Result) -> Future[Result]:
    """A future that has its result, as PyTorch's readers and writers return one."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
