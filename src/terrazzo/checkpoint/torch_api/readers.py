"""Readers: the library's own, which fill targets, and all others, which carry out plans of PyTorch's items."""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.futures import Future

from terrazzo.checkpoint.metadata import STORAGE_TYPES, Metadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.chunks import complete_parts
from terrazzo.checkpoint.native.rows import ReadPlan, Target, ValueReceiver
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.torch_api.items import AT_ONCE, fill_items, items_of, value_item
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box

# A subclass of a user's own that changes one of these sees PyTorch's plans.
_SEES_PLANS: Final = ("set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


class TargetReader(StorageReader):
    """A reader that fills targets (`native.rows`).

    PyTorch's items become targets here, for planners that see them.
    """

    plans_alone = True
    bytes_read = 0
    _table: Mapping[str, STORAGE_TYPES] | None = None  # what is stored
    _at_once: float = AT_ONCE  # bytes that are read together for PyTorch's items

    @abc.abstractmethod
    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the targets, on any devices and of any dtypes, from the parts of stored chunks that they name."""

    @abc.abstractmethod
    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterable[io.BytesIO]:
        """The values of these names, which are not tensors: as `ObjectBytes`, or as bytes that a planner encoded."""

    @property
    def takes_read_plans(self) -> bool:
        """Whether plans come in the library's own form: not if a subclass sees or changes PyTorch's."""
        kind, own = type(self), vars(self)
        return all(getattr(kind, name).__module__.startswith("terrazzo.") and name not in own for name in _SEES_PLANS)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._table = None
        self.bytes_read = 0

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self._table = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read(self, plan: ReadPlan, receiver: ValueReceiver) -> None:
        """Carry out a plan in the library's own form."""
        found = self.values([source for _, source in plan.values], receiver.allow_pickle)
        for (name, _), value in zip(plan.values, found, strict=True):
            receiver.put_value(name, value)
        self.fill(plan.targets)

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        found = self.values([item.storage_index.fqn for item in values], getattr(planner, "allow_pickle", False))
        for item, value in zip(values, found, strict=True):
            planner.load_bytes(item, value)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        fill_items(tensors, planner, self._entry_of, self.fill, self._at_once)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _entry_of(self, name: str) -> TensorStorageMetadata:
        if self._table is None:  # a subclass of a user's own may have another `set_up_storage_reader`
            self._table = self.read_metadata().state_dict_metadata
        entry = self._table.get(name)
        if entry is None:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}")
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is not a tensor in the checkpoint")
        return entry


class Boxes:
    """Boxes of tensors and single values of any checkpoint, read through its reader, without a state dict.

    Attributes:
        metadata: the checkpoint's metadata.
    """

    def __init__(self, reader: StorageReader, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self.metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, True)
        is_ours = isinstance(reader, TargetReader) and reader.takes_read_plans
        self._reader: Any = reader if is_ours else _ByItems(reader)

    def tensor(self, name: str) -> TensorStorageMetadata:
        """The entry of a tensor."""
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise UnsupportedValueError(f"{name} is not a tensor")
        return entry

    @torch.no_grad()
    def read(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Fill tensors, each with a box of the tensor of a name."""
        self._reader.fill(
            [
                Target(name, name, target, box, complete_parts(name, self.tensor(name).chunks, box), number)
                for number, (name, box, target) in enumerate(wanted)
                if not box.is_empty
            ]
        )

    def value(self, name: str) -> io.BytesIO:
        """A value that is not a tensor: an `ObjectBytes`, or bytes that a custom planner encoded."""
        (found,) = self._reader.values([name], self._allow_pickle)
        value: io.BytesIO = found
        return value


class _ByItems:
    """A reader of a user's own, or one built on PyTorch's classes, which reads items."""

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill the targets."""
        by_index = {MetadataIndex(each.source, each.box.offsets): each for each in targets}
        items = [item for index, each in by_index.items() for item in items_of(index, each.source, each.parts)]
        self._read(items, _Planner(by_index))

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        """The values of these names."""
        for name in names:
            planner = _Planner({}, allow_pickle)
            self._read([value_item(name, name)], planner)
            if planner.loaded is None:
                raise CheckpointCorruptError(f"{name}: the reader gave no value")
            yield planner.loaded

    def _read(self, items: list[ReadItem], planner: _Planner) -> None:
        self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(items)), planner).wait()


class _Planner(DefaultLoadPlanner):
    """A planner of targets, or of one value, whose items have been made."""

    def __init__(self, targets: Mapping[MetadataIndex, Target], allow_pickle: bool = False) -> None:
        super().__init__(allow_pickle=allow_pickle)
        self._by_index = targets
        self.loaded: io.BytesIO | None = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded = value

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        target = self._by_index.get(index)
        if target is None:
            raise CheckpointCorruptError(f"{index.fqn} is stored as a tensor, not as a value")
        return target.tensor
