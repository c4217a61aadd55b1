"""The interface between a save and a storage writer, beyond PyTorch's interface.

A writer may have a `save_side()`, which returns an object with this interface: ranks may then plan alone, and results
are sent in the writer's own form. For other writers, including those built on PyTorch's classes, `PlainSide` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.root import Path
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.planner import SavePlan
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointError


class SaveSide(Protocol):
    """A writer, as a save uses it."""

    save_id: str

    @property
    def plans_alone(self) -> bool:
        """Whether this writer does not need the global step."""
        ...

    def build_on(self, base: Store) -> None:
        """Share unchanged tensors of this checkpoint instead of writing them again."""
        ...

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        """A rank's plan with the names of its files; called only if `plans_alone`."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether a rank's part can be given to `write` as rows."""
        ...

    def write(self, rows: Sequence[Row], save_id: str, rank: int) -> Sequence[WriteResult]:
        """Write a rank's rows; called only if the writer `takes_rows`."""
        ...

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        """Encode the results of `write` or `write_data`, for the coordinator."""
        ...

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        """Decode the results of `encode_results`."""
        ...

    def committed(self, metadata: Metadata) -> bytes:
        """After `finish`, on the coordinator: the data from which the other ranks make the metadata."""
        ...

    def describe_committed(self, data: bytes) -> Metadata:
        """The checkpoint's metadata, on the other ranks."""
        ...

    def may_abandon(self) -> bool:
        """Whether, after `finish` failed, the checkpoint is certainly not committed: its files can then be removed."""
        ...

    def abandon(self) -> None:
        """Remove the files that this rank has written, because the save failed on some rank."""
        ...


class PlainSide:
    """A writer with PyTorch's interface only."""

    plans_alone = False
    takes_rows = False

    def __init__(self, writer: StorageWriter) -> None:
        self.save_id = getattr(writer, "save_id", "")

    def build_on(self, base: Store) -> None:
        raise CheckpointError("base works with terrazzo's format only: leave out base or storage_writer")

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        raise CheckpointError("this storage writer makes final plans in prepare_global_plan only")

    def write(self, rows: Sequence[Row], save_id: str, rank: int) -> Sequence[WriteResult]:
        raise CheckpointError("this storage writer writes items")

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        return messages.encode(list(results))

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        found: list[WriteResult] = messages.decode(data, list)
        return found

    def committed(self, metadata: Metadata) -> bytes:
        return messages.encode(metadata)

    def describe_committed(self, data: bytes) -> Metadata:
        return messages.decode(data, Metadata)

    def may_abandon(self) -> bool:
        return False

    def abandon(self) -> None:
        """Do nothing: only the writer knows which files it has written."""


def side_of(writer: StorageWriter) -> SaveSide:
    """The interface of a writer for a save."""
    own = getattr(writer, "save_side", None)
    side: SaveSide = PlainSide(writer) if own is None else own()
    return side


def encode_with_paths(results: bytes, planner_data: Any) -> bytes:
    """Encode a rank's results and the paths of its names, for the coordinator.

    Paths whose keys cannot be stored are left out; their names are loaded at the top of the state dict.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    plain = {name: path for name, path in paths.items() if all(type(key) is str or type(key) is int for key in path)}
    return msgspec.msgpack.encode((msgspec.msgpack.encode(plain), results))


def decode_all(parts: list[bytes], side: SaveSide) -> tuple[list[Sequence[WriteResult]], dict[str, Path] | None]:
    """The results of all ranks, and the paths of all names."""
    results: list[Sequence[WriteResult]] = []
    seen: set[bytes] = set()
    paths: dict[str, Path] = {}
    for part in parts:
        encoded_paths, encoded = msgspec.msgpack.decode(part, type=tuple[bytes, bytes])
        results.append(side.decode_results(encoded))
        if encoded_paths not in seen:
            seen.add(encoded_paths)
            paths.update(msgspec.msgpack.decode(encoded_paths, type=dict[str, Path]))
    return results, paths or None
