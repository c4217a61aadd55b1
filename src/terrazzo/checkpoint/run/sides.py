"""What saves and loads ask of planners, writers and readers beyond PyTorch's interface, and the answers of those that
have that interface only.

Terrazzo's own classes answer for themselves: they have all that a class here has, and return what answers for them
from `save_side()` or `load_side()`. For all others, including those built on PyTorch's classes, the classes here do.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.rows import ReadPlan, Row, ValueReceiver
from terrazzo.checkpoint.plan.global_plan import GlobalPlanCache
from terrazzo.checkpoint.plan.ownership import Agreement
from terrazzo.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointError

_THEIRS: Final = "torch.distributed.checkpoint.default_planner"


class WriterSide:
    """A writer, as a save uses it.

    Attributes:
        save_id: the id of the save, if the writer has given it one.
        plans_alone: whether the writer does not need the global step.
        takes_rows: whether a rank's part can be given to `write` as rows.
    """

    plans_alone: bool = False
    takes_rows: bool = False

    def __init__(self, writer: StorageWriter) -> None:
        self.save_id: str = getattr(writer, "save_id", "")

    def build_on(self, base: Store) -> None:
        """Share unchanged tensors of this checkpoint instead of writing them again."""
        raise CheckpointError("base works with terrazzo's format only: leave out base or storage_writer")

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        """A rank's plan with the names of its files; called only if `plans_alone`."""
        raise CheckpointError("this storage writer makes final plans in prepare_global_plan only")

    def write(self, rows: Sequence[Row], save_id: str, rank: int) -> Sequence[WriteResult]:
        """Write a rank's rows; called only if the writer `takes_rows`."""
        raise CheckpointError("this storage writer writes items")

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        """Encode the results of `write` or `write_data`, for the coordinator."""
        return messages.encode(list(results))

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        """Decode the results of `encode_results`."""
        found: list[WriteResult] = messages.decode(data, list)
        return found

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


class ReaderSide:
    """A reader, as a load uses it; it may have `plans_alone` and `bytes_read`.

    Attributes:
        takes_roots: whether one rank can read the checkpoint's root for all ranks.
        takes_read_plans: whether `read` carries out plans in the library's own form.
    """

    takes_roots: bool = False
    takes_read_plans: bool = False

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader

    @property
    def plans_alone(self) -> bool:
        """Whether this reader does not need the global step."""
        return getattr(self._reader, "plans_alone", False)

    @property
    def bytes_read(self) -> int:
        """The number of bytes read, if it is known."""
        return getattr(self._reader, "bytes_read", 0)

    def root(self) -> bytes:
        """The root of the present checkpoint; called only if the reader `takes_roots`."""
        raise CheckpointError("this storage reader has no root")

    def use_root(self, data: bytes) -> Metadata:
        """The metadata of the checkpoint with this root; `read` then reads this checkpoint, not a later one."""
        raise CheckpointError("this storage reader has no root")

    def read(self, plan: ReadPlan, receiver: ValueReceiver) -> None:
        """Carry out a plan; called only if the reader `takes_read_plans`."""
        raise CheckpointError("this storage reader reads items")


class SavePlannerSide:
    """A planner, as a save uses it: without a way of its own, its plans go through the coordinator.

    Attributes:
        plan_cache: the last global plan, if the planner keeps it.
        plans_alone: whether each rank can compute its own part, by `hold` or `hold_items`.
    """

    plan_cache: GlobalPlanCache | None = None
    plans_alone: bool = False

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""

    def hold(self) -> Agreement | None:
        """What this rank could write as rows, instead of `create_local_plan`; None if this planner needs items."""
        return None

    def hold_items(self, plan: SavePlan) -> Agreement | None:
        """What this rank could write, from its local plan; None if only the coordinator can say what it writes."""
        return None

    def items_of(self, plan: SavePlan, rows: Sequence[Row]) -> list[WriteItem]:
        """The items of the local plan, or parts of them, that these rows of `hold_items` are."""
        raise CheckpointError("this planner makes final plans in create_global_plan only")

    def forget(self) -> None:
        """Release the state at the end of the save."""


class LoadPlannerSide:
    """A planner, as a load uses it.

    Attributes:
        plans_alone: whether the planner has no global step.
        allow_pickle: whether values that were stored as pickles may be unpickled.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self.plans_alone: bool = getattr(planner, "plans_alone", False)
        self.allow_pickle: bool = getattr(planner, "allow_pickle", False)

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""

    def read_plan(self) -> ReadPlan | None:
        """What this rank reads, in the library's own form, instead of `create_local_plan`; None if this planner needs
        items."""
        return None

    def put_value(self, name: str, value: io.BytesIO) -> None:
        """Set a value of the `read_plan` in the state dict."""
        raise CheckpointError("this planner takes values by load_bytes only")

    def write_back(self) -> None:
        """Set values in the caller's state dict that are not in it yet, when everything has been read."""

    def forget(self) -> None:
        """Release the state dict at the end of the load."""


def side_of_writer(writer: StorageWriter) -> WriterSide:
    """What answers for a writer."""
    own: Any = getattr(writer, "save_side", None)
    side: WriterSide = WriterSide(writer) if own is None else own()
    return side


def side_of_reader(reader: StorageReader) -> ReaderSide:
    """What answers for a reader."""
    own: Any = getattr(reader, "load_side", None)
    side: ReaderSide = ReaderSide(reader) if own is None else own()
    return side


def save_side_of(planner: SavePlanner) -> SavePlannerSide:
    """What answers for a planner of a save."""
    own: Any = getattr(type(planner), "save_side", None)  # of its class: an instance may delegate to another planner
    side: SavePlannerSide = SavePlannerSide() if own is None else own(planner)
    return side


def load_side_of(planner: LoadPlanner) -> LoadPlannerSide:
    """What answers for a planner of a load."""
    own: Any = getattr(type(planner), "load_side", None)
    side: LoadPlannerSide = LoadPlannerSide(planner) if own is None else own(planner)
    return side


def check_planner(planner: object) -> None:
    """Raise for a planner that is built on PyTorch's default planners: its plans are PyTorch's, not terrazzo's."""
    for kind in type(planner).__mro__:
        if kind.__module__ == _THEIRS and kind.__qualname__ in ("DefaultSavePlanner", "DefaultLoadPlanner"):
            own = type(planner)
            raise CheckpointError(
                f"the planner {own.__module__}.{own.__qualname__} is PyTorch's {kind.__qualname__} or built on it; "
                f"change the import: from terrazzo.checkpoint import {kind.__qualname__}"
            )
