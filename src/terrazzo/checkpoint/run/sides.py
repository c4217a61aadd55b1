"""What a save asks of a writer beyond PyTorch's interface, and the answers of a writer that has that interface only.

Terrazzo's own writers have all that `WriterSide` has, or return from `save_side()` what has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.planner import SavePlan
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
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


def side_of_writer(writer: StorageWriter) -> WriterSide:
    """What answers for a writer."""
    own: Any = getattr(writer, "save_side", None)
    side: WriterSide = WriterSide(writer) if own is None else own()
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
