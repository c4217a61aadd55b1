"""Data loaders that know their own place, such as torchdata's `StatefulDataLoader`: it is part of a run's checkpoints.

Every data-parallel rank has a loader of its own, at its own place, so checkpoints hold one state per rank.  As many
data-parallel ranks as there were go on from theirs.  Others cannot know who takes which samples, unless all states are
the same, as those of a loader are that counts in samples of all ranks.
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
    """Gives batches, and says after which batch it is; after `load_state_dict` the next `iter` goes on there."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def checked_loader(loader: Any) -> StatefulLoader:
    """A loader that was passed for its position to be saved."""
    if not isinstance(loader, StatefulLoader):
        raise EngineConfigError(
            f"training_dataloader is a {type(loader).__name__} without state_dict and load_state_dict, so its position "
            "cannot be saved: pass a StatefulDataLoader of torchdata, or the dataset as training_data, or iterate over "
            "the loader without passing it"
        )
    return loader


def position_of(loader: StatefulLoader | None, data: Axis) -> PerRank | None:
    """What a checkpoint holds of the loader of this rank."""
    if loader is None:
        return None
    return PerRank({"rank": data.index, "ranks": data.size, "state": loader.state_dict()})


def stored_position(checkpoint: Checkpoint, loader: StatefulLoader | None, data: Axis) -> dict[str, Any] | None:
    """The state that this rank's loader goes on from; None if the checkpoint has none."""
    names = [name for name in checkpoint if name.startswith(f"{NAME}@")]
    if not names or loader is None:
        return {} if names else None
    own = f"{NAME}@{dist.get_rank()}"
    mine = checkpoint[own] if own in checkpoint else {}
    if (mine.get("rank"), mine.get("ranks")) == (data.index, data.size):
        return mine["state"]
    entries = [checkpoint[name] for name in names]
    if entries[0]["ranks"] == data.size:  # as many, of models that are cut otherwise
        return next(entry["state"] for entry in entries if entry["rank"] == data.index)
    if len({encode(entry["state"]) for entry in entries}) > 1:
        raise EngineError(
            f"{NAME}: the checkpoint has the positions of {entries[0]['ranks']} data-parallel ranks, each its own, and "
            f"here are {data.size}: resume on as many, or have the engine read the data (training_data), which it "
            "divides among any number of ranks"
        )
    return entries[0]["state"]
