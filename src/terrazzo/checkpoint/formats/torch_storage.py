"""Storage classes that are built on PyTorch's `StorageWriter` and `StorageReader`, in the place of terrazzo's.

They know PyTorch's plans, items and metadata. These have the fields of ours, and are told apart by their classes
alone; so they are made anew, field by field, on their way in and out.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, Final

from torch.futures import Future

from terrazzo._torch.replaced import originals
from terrazzo.checkpoint import metadata as our_metadata
from terrazzo.checkpoint import planner as our_planner
from terrazzo.checkpoint.metadata import Metadata, StorageMeta
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from terrazzo.checkpoint.storage import StorageReader, StorageWriter, WriteResult, done, with_kwargs
from terrazzo.checkpoint.torch_api.file_systems import SerializationFormat

_MODULE: Final = "torch.distributed.checkpoint.storage"
_METADATA: Final = (
    "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "StorageMeta", "Metadata",
)  # fmt: skip
_PLANNER: Final = (
    "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData", "ReadItem", "LoadItemType", "SavePlan",
    "LoadPlan",
)  # fmt: skip


def usable_writer(writer: Any) -> Any:
    """The writer, adapted if it is built on PyTorch's classes."""
    return TorchStorageWriter(writer) if _is_theirs(writer, "StorageWriter") else writer


def usable_reader(reader: Any) -> Any:
    """The reader, adapted if it is built on PyTorch's classes."""
    return TorchStorageReader(reader) if _is_theirs(reader, "StorageReader") else reader


def _is_theirs(storage: Any, name: str) -> bool:
    module = sys.modules.get(_MODULE)  # if it has not been imported, no class is derived from its classes
    if module is None or storage is None or isinstance(storage, StorageWriter | StorageReader):
        return False
    with originals():
        return isinstance(storage, getattr(module, name))


@cache
def classes() -> tuple[dict[type, type], dict[type, type]]:
    """Which of their classes stands for which of ours, and the other way round."""
    with originals():
        from torch.distributed.checkpoint import filesystem
        from torch.distributed.checkpoint import metadata as their_metadata
        from torch.distributed.checkpoint import planner as their_planner
        from torch.distributed.checkpoint import storage as their_storage

        pairs = {getattr(our_metadata, name): getattr(their_metadata, name) for name in _METADATA}
        pairs |= {getattr(our_planner, name): getattr(their_planner, name) for name in _PLANNER}
        pairs[WriteResult] = their_storage.WriteResult
        pairs[SerializationFormat] = filesystem.SerializationFormat
    return pairs, {theirs: ours for ours, theirs in pairs.items()}


def to_theirs(value: Any) -> Any:
    """The same value, of PyTorch's classes."""
    return _made_of(value, classes()[0])


def to_ours(value: Any) -> Any:
    """The same value, of our classes."""
    return _made_of(value, classes()[1])


def _made_of(value: Any, classes: dict[type, type]) -> Any:
    kind = type(value)
    other: Any = next((classes[base] for base in kind.__mro__ if base in classes), None)
    if other is None:
        if kind is list:
            return [_made_of(item, classes) for item in value]
        if kind is dict:
            return {_made_of(key, classes): _made_of(item, classes) for key, item in value.items()}
        return value
    if issubclass(other, Enum):
        return other[value.name]
    made: Any = object.__new__(other)
    for field in dataclasses.fields(other):
        if hasattr(value, field.name):
            content = getattr(value, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            content = field.default_factory()
        else:
            content = None if field.default is dataclasses.MISSING else field.default
        # What storages and planners put there is their own.
        own = field.name in ("planner_data", "storage_data") and other.__name__ != "Metadata"
        object.__setattr__(made, field.name, content if own else _made_of(content, classes))
    return made


class _Adapted:
    """What is the same of writers and readers."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    @property
    def checkpoint_id(self) -> Any:
        """Where the checkpoint is, or goes, if the storage says so."""
        return getattr(self._theirs, "checkpoint_id", None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._theirs.reset(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        return to_ours(self._theirs.prepare_local_plan(to_theirs(plan)))

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return to_ours(list(self._theirs.prepare_global_plan(to_theirs(list(plans)))))


class TorchStorageWriter(_Adapted, StorageWriter):
    """Writes with a writer that was built for PyTorch."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._theirs.set_up_storage_writer(
            is_coordinator, *args, **with_kwargs(self._theirs.set_up_storage_writer, **kwargs)
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = self._theirs.write_data(to_theirs(plan), _AskedPlanner(planner)).wait()
        return done(to_ours(list(results)))

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        theirs = to_theirs(metadata)
        self._theirs.finish(theirs, [to_theirs(list(part)) for part in results])
        metadata.storage_data = to_ours(theirs.storage_data)
        metadata.storage_meta = to_ours(theirs.storage_meta)

    def storage_meta(self) -> StorageMeta | None:
        return to_ours(self._theirs.storage_meta())


class TorchStorageReader(_Adapted, StorageReader):
    """Reads with a reader that was built for PyTorch."""

    plans_alone = False
    _metadata: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata = self._theirs.read_metadata()
        return to_ours(self._metadata)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        theirs = to_theirs(metadata) if self._metadata is None else self._metadata
        more = with_kwargs(self._theirs.set_up_storage_reader, **kwargs)
        self._theirs.set_up_storage_reader(theirs, is_coordinator, *args, **more)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._theirs.read_data(to_theirs(plan), _AskedPlanner(planner)).wait()
        return done(None)


_ASKED: Final = ("resolve_data", "load_bytes", "resolve_bytes", "resolve_tensor", "commit_tensor")


class _AskedPlanner:
    """What a storage asks of the planner, about items of its own classes."""

    def __init__(self, planner: SavePlanner | LoadPlanner) -> None:
        for name in _ASKED:
            call = getattr(planner, name, None)
            if call is not None:
                setattr(self, name, partial(_asked, call))


def _asked(call: Callable[..., Any], item: Any, *rest: Any) -> Any:
    return call(to_ours(item), *rest)
