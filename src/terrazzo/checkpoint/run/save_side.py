"""What a save asks of a storage writer beyond PyTorch's interface: the one protocol between sessions and writers.

A writer that has a `save_side()` takes part as what that returns: ranks may then plan alone, and results travel in the
writer's own form.  Any other one, also one built on PyTorch's classes, takes part as a `PlainSide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.manifest import Path
from terrazzo.checkpoint.native.plans import WritePlan
from terrazzo.checkpoint.planner import SavePlan
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointError


class SaveSide(Protocol):
    """A writer as a save sees it."""

    save_id: str

    @property
    def plans_alone(self) -> bool:
        """Whether ranks need not send their plans to the coordinator for this writer's sake."""
        ...

    def build_on(self, base: Store) -> None:
        """What this checkpoint has already need not be written again."""
        ...

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        """A rank's plan with the names of its files settled; asked only if `plans_alone`."""
        ...

    @property
    def takes_write_plans(self) -> bool:
        """Whether `write` carries out plans in the library's own form."""
        ...

    def write(self, plan: WritePlan, save_id: str, rank: int) -> Sequence[WriteResult]:
        """Carry out a rank's plan; asked only if it `takes_write_plans`."""
        ...

    def encode_results(self, results: Sequence[WriteResult]) -> bytes:
        """What `write` or `write_data` returned on a rank, for the coordinator."""
        ...

    def decode_results(self, data: bytes) -> Sequence[WriteResult]:
        """What `encode_results` made."""
        ...

    def committed(self, metadata: Metadata) -> bytes:
        """After `finish`, on the coordinator: what the other ranks need to describe the checkpoint."""
        ...

    def describe_committed(self, data: bytes) -> Metadata:
        """The checkpoint's metadata, on the other ranks."""
        ...

    def may_abandon(self) -> bool:
        """After `finish` failed: whether the checkpoint is certainly not valid, so that its files are of no use."""
        ...

    def abandon(self) -> None:
        """The save has failed on some rank: remove what this rank has written."""
        ...


class PlainSide:
    """Any writer that knows PyTorch's interface only."""

    plans_alone = False
    takes_write_plans = False

    def __init__(self, writer: StorageWriter) -> None:
        self.save_id = getattr(writer, "save_id", "")

    def build_on(self, base: Store) -> None:
        raise CheckpointError("base is for terrazzo's own format; leave it out, or leave out storage_writer")

    def place(self, plan: SavePlan, save_id: str, rank: int) -> SavePlan:
        raise CheckpointError("this storage writer settles plans in prepare_global_plan only")

    def write(self, plan: WritePlan, save_id: str, rank: int) -> Sequence[WriteResult]:
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
        """Nothing: what it has written is known to the writer alone."""


def side_of(writer: StorageWriter) -> SaveSide:
    """How a writer takes part in a save."""
    own = getattr(writer, "save_side", None)
    side: SaveSide = PlainSide(writer) if own is None else own()
    return side


def encode_with_paths(results: bytes, planner_data: Any) -> bytes:
    """A rank's results and the paths of its names, for the coordinator.

    Only paths whose keys can be stored as they are; other names are found at the top of the state dict.
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
