"""Writers: the library's own, which write rows, and all others, which carry out plans of PyTorch's items."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch.futures import Future

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.planner import SavePlan, SavePlanner
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.torch_api.items import rows_of
from terrazzo.errors import CheckpointError

# A subclass of a user's own that changes one of these sees PyTorch's plans.
_SEES_PLANS: Final = ("prepare_local_plan", "prepare_global_plan", "placed", "write_data")


class SaveSide:
    """What a save asks of a writer beyond PyTorch's interface; here, the answers for a writer that has no more.

    Attributes:
        plans_alone: whether it is a `RowWriter` that does not need the plans of all ranks.
        takes_rows: whether it is a `RowWriter` whose `write` can be given a rank's part.
    """

    plans_alone: bool = False
    takes_rows: bool = False

    def build_on(self, base: Store) -> None:
        """Share unchanged tensors of this checkpoint instead of writing them again."""
        raise CheckpointError("base works with terrazzo's format only: leave out base or storage_writer")

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
        return type(self).prepare_global_plan is RowWriter.prepare_global_plan

    @property
    def takes_rows(self) -> bool:  # type: ignore[override]  # the same
        """Whether a rank's part comes as rows: not if a subclass sees or changes PyTorch's plans."""
        kind, own = type(self), vars(self)
        return all(getattr(kind, name) is getattr(RowWriter, name) and name not in own for name in _SEES_PLANS)

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
        done: Future[list[WriteResult]] = Future()
        # A `Sequence`, which may be made only when it is read.
        done.set_result(self.write(rows_of(plan.items, planner), *where))  # type: ignore[arg-type]
        return done


def side_of_writer(writer: StorageWriter) -> SaveSide:
    """What answers for a writer."""
    return writer if isinstance(writer, RowWriter) else SaveSide()
