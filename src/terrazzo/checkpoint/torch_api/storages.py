"""Readers and writers: the library's own, which fill targets and write rows, and all others, which carry out plans of
PyTorch's items."""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.futures import Future

from terrazzo.checkpoint.metadata import STORAGE_TYPES, Metadata, MetadataIndex, TensorStorageMetadata
from terrazzo.checkpoint.native.chunks import complete_parts
from terrazzo.checkpoint.native.rows import ReadPlan, Row, Target
from terrazzo.checkpoint.native.tensors import empty
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageReader, StorageWriter, WriteResult, done
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.torch_api.items import AT_ONCE, fill_items, items_of, rows_of, value_item
from terrazzo.errors import CheckpointCorruptError, CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box

# A subclass of a user's own that changes one of these sees PyTorch's plans.
_READER_SEES: Final = ("set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def _are_ours(storage: StorageReader | StorageWriter, names: Sequence[str]) -> bool:
    """Whether these methods are the library's: no class of a user's own, nor the object itself, has others."""
    kind, own = type(storage), vars(storage)
    return all(getattr(kind, name).__module__.startswith("terrazzo.") and name not in own for name in names)


class TargetReader(StorageReader):
    """A reader that fills targets (`native.rows`).

    PyTorch's items become targets here, for planners that see them.
    """

    plans_alone = True
    bytes_read = 0
    rank: int | None = None  # this process's among those that load
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
        return _are_ours(self, _READER_SEES)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._table = None
        self.bytes_read = 0

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._table = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read(self, plan: ReadPlan, planner: DefaultLoadPlanner) -> None:
        """Carry out a plan in the library's own form."""
        found = self.values([source for _, source in plan.values], planner.allow_pickle)
        for (name, _), value in zip(plan.values, found, strict=True):
            planner.put_value(name, value)
        self.fill(plan.targets)

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        found = self.values([item.storage_index.fqn for item in values], getattr(planner, "allow_pickle", False))
        for item, value in zip(values, found, strict=True):
            planner.load_bytes(item, value)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        fill_items(tensors, planner, self._entry_of, self.fill, self._at_once)
        return done(None)

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

    def read_many(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several whole tensors, read together: if they are small, much faster than one by one."""
        found = {}
        for name in names:
            entry = self.tensor(name)
            found[name] = empty(name, entry.size, entry.properties.dtype)
        self.read((name, Box.whole(target.shape), target) for name, target in found.items())
        return found

    def value(self, name: str) -> io.BytesIO:
        """A value that is not a tensor: an `ObjectBytes`, or bytes that a custom planner encoded."""
        (found,) = self._reader.values([name], self._allow_pickle)
        return found


class _ByItems:
    """A reader of a user's own, or one built on PyTorch's classes, which reads items."""

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader

    def fill(self, targets: Sequence[Target]) -> None:
        by_index = {MetadataIndex(each.source, each.box.offsets): each for each in targets}
        items = [item for index, each in by_index.items() for item in items_of(index, each.source, each.parts)]
        self._read(items, _Planner(by_index))

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
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


# ------------------------------------------------------------------ writers


# A subclass of a user's own that changes one of these sees PyTorch's plans.
_WRITER_SEES: Final = ("prepare_local_plan", "prepare_global_plan", "write_data")


class SaveSide:
    """What a save asks of a writer beyond PyTorch's interface; here, the answers for a writer that has no more.

    Attributes:
        plans_alone: whether it is a `RowWriter` that does not need the plans of all ranks.
        takes_rows: whether it is a `RowWriter` whose `write` can be given a rank's part.
        writes_apart: whether each rank can commit a checkpoint of its own into one folder.
    """

    plans_alone: bool = False
    takes_rows: bool = False
    writes_apart: bool = False

    def build_on(self, base: Store) -> None:
        """Share unchanged tensors of this checkpoint instead of writing them again."""
        raise CheckpointError("base works with terrazzo's format only: leave out base or storage_writer")

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        """Encode the results of `write` or `write_data`, for the coordinator."""
        return messages.encode(list(results))

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        """Decode the results of `encode_results`."""
        return messages.decode(data, list)

    def committed(self, metadata: Metadata) -> bytes:
        """After `finish`, on the coordinator: the data from which the other ranks make the metadata."""
        return messages.encode(metadata)

    def describe_committed(self, data: bytes) -> Metadata:
        """The checkpoint's metadata, on the other ranks."""
        return messages.decode(data, Metadata)

    def may_abandon(self) -> bool:
        """Whether, after `finish` failed, the checkpoint is certainly not committed: its files can then be removed."""
        return False

    def abandon(self) -> None:
        """Remove the files that this rank has written, because the save failed on some rank. Does nothing here: only
        the writer knows which they are."""

    def about(self, rows: Sequence[Row]) -> bytes:
        """What the coordinator needs to know of the rows that this rank holds before any are written."""
        return b""

    def arranged(self, abouts: Sequence[bytes]) -> bytes:
        """On the coordinator: what all ranks need to know to write, from what `about` of each returned."""
        return b""

    def arranged_of(self, plans: Sequence[SavePlan]) -> bytes:
        """The same, from the plans of all ranks."""
        return b""

    def begin(self, arranged: bytes, rank: int) -> None:
        """What `arranged_of` returned on the coordinator, and this rank's number."""


class RowWriter(SaveSide, StorageWriter):
    """A writer of rows (`native.rows`): a subclass has `write`.

    PyTorch's items become rows here, for planners and subclasses that see them.
    """

    save_id = ""  # of the save that is under way
    _begun: tuple[bytes, int] | None = None  # for plans into which a subclass's prepare_global_plan has put its own

    @property
    def plans_alone(self) -> bool:  # type: ignore[override]  # an attribute of other writers' sides
        """Whether ranks need not send their plans to the coordinator for this writer's sake."""
        return _are_ours(self, ("prepare_global_plan", "finish"))  # which get all plans, and all metadata

    @property
    def takes_rows(self) -> bool:  # type: ignore[override]  # the same
        """Whether a rank's part comes as rows: not if a subclass sees or changes PyTorch's plans."""
        return _are_ours(self, _WRITER_SEES)

    @abc.abstractmethod
    def write(self, rows: Sequence[Row], arranged: bytes, rank: int) -> Sequence[WriteResult]:
        """Write a rank's rows."""

    def arranged(self, abouts: Sequence[bytes]) -> bytes:
        return self.save_id.encode()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        arranged = self.arranged_of(plans)
        return [self.placed(plan, arranged, rank) for rank, plan in enumerate(plans)]

    def arranged_of(self, plans: Sequence[SavePlan]) -> bytes:
        for plan in plans:
            match plan.storage_data:
                case (bytes(arranged), int()):  # they have been `placed`: files may be reserved, which is done once
                    return arranged
        return self.arranged([self.about(rows_of(plan.items)) for plan in plans])

    def begin(self, arranged: bytes, rank: int) -> None:
        self._begun = arranged, rank

    def placed(self, plan: SavePlan, arranged: bytes, rank: int) -> SavePlan:
        """A rank's plan, for `write_data`."""
        return replace(plan, storage_data=(arranged, rank))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        where = plan.storage_data if isinstance(plan.storage_data, tuple) else self._begun
        if where is None:
            raise CheckpointError("the plan has not passed through this writer's prepare_global_plan")
        # A `Sequence`, which may be made only when it is read.
        return done(self.write(rows_of(plan.items, planner), *where))  # type: ignore[arg-type]
