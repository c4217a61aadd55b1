"""Data loaders that save and restore their own position, such as torchdata's `StatefulDataLoader`.

Every data-parallel rank has its own loader with its own position, so checkpoints hold one state per rank. The same
number of data-parallel ranks continues from these. On another number it is unknown which rank takes which samples,
unless all states are equal, as those of a loader are that counts samples over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol, runtime_checkable

import torch.distributed as dist

from terrazzo.checkpoint import Checkpoint, PerRank
from terrazzo.checkpoint.native.objects import encode
from terrazzo.comm import Axis
from terrazzo.errors import EngineConfigError, EngineError

NAME: Final = "training_dataloader"


@runtime_checkable
class StatefulLoader(Protocol):
    """Gives batches, and its state says after which batch it is; after `load_state_dict`, `iter` continues there."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def checked_loader(loader: Any) -> StatefulLoader:
    """The loader, if its position can be saved; else an error."""
    if not isinstance(loader, StatefulLoader):
        raise EngineConfigError(
            f"training_dataloader is a {type(loader).__name__} without state_dict and load_state_dict, so its position "
            "cannot be saved: pass a StatefulDataLoader of torchdata, pass the dataset as training_data, or iterate "
            "over the loader without passing it"
        )
    return loader


def position_of(loader: StatefulLoader | None, data: Axis) -> PerRank | None:
    """The position of this rank's loader, as a checkpoint stores it."""
    if loader is None:
        return None
    return PerRank({"rank": data.index, "ranks": data.size, "state": loader.state_dict()})


def stored_position(checkpoint: Checkpoint, loader: StatefulLoader | None, data: Axis) -> dict[str, Any] | None:
    """The state from which this rank's loader continues; None if the checkpoint has none."""
    names = [name for name in checkpoint if name.startswith(f"{NAME}@")]
    if not names or loader is None:
        return {} if names else None
    own = f"{NAME}@{dist.get_rank()}"
    mine = checkpoint[own] if own in checkpoint else {}
    if (mine.get("rank"), mine.get("ranks")) == (data.index, data.size):
        return mine["state"]
    entries = [checkpoint[name] for name in names]
    if entries[0]["ranks"] == data.size:  # the same number, perhaps with another model parallelism
        return next(entry["state"] for entry in entries if entry["rank"] == data.index)
    if len({encode(entry["state"]) for entry in entries}) > 1:
        raise EngineError(
            f"{NAME}: the checkpoint has a separate position for each of {entries[0]['ranks']} data-parallel ranks, "
            f"but this run has {data.size}: resume on the same number, or pass the dataset as training_data, which can "
            "be divided among any number of ranks"
        )
    return entries[0]["state"]
