"""Which steps of a run are saved, and which checkpoints are kept: `CheckpointManager` and its policies."""

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.checkpoint.manager.manager import CheckpointManager
    from terrazzo.checkpoint.manager.policies import (
        Best,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepPolicy,
        KeepUntilCopied,
        KeepWhen,
        Moment,
        SaveAny,
        SaveAt,
        SaveEvery,
        SaveFirst,
        SaveOnStop,
        SavePolicy,
    )
    from terrazzo.checkpoint.manager.records import Record
    from terrazzo.checkpoint.manager.tiers import Which

__all__ = [
    "Best",
    "CheckpointManager",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepUntilCopied",
    "KeepWhen",
    "Moment",
    "Record",
    "SaveAny",
    "SaveAt",
    "SaveEvery",
    "SaveFirst",
    "SaveOnStop",
    "SavePolicy",
    "Which",
]

__getattr__, __dir__ = late(__name__, ["committing", "hosts", "housekeeping"])
