"""Which steps of a run are saved, and which checkpoints are kept: `CheckpointManager` and its policies."""

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.checkpoint.manager.keeping import (
        Best,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepPolicy,
        KeepUntilCopied,
        KeepWhen,
    )
    from terrazzo.checkpoint.manager.manager import CheckpointManager
    from terrazzo.checkpoint.manager.records import Record
    from terrazzo.checkpoint.manager.saving import (
        Moment,
        SaveAny,
        SaveAt,
        SaveEvery,
        SaveFirst,
        SaveOnStop,
        SavePolicy,
    )
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

__getattr__, __dir__ = late(
    __name__,
    {
        "keeping": [
            "Best",
            "KeepAny",
            "KeepBest",
            "KeepEvery",
            "KeepLast",
            "KeepPolicy",
            "KeepUntilCopied",
            "KeepWhen",
        ],
        "manager": ["CheckpointManager"],
        "records": ["Record"],
        "saving": ["Moment", "SaveAny", "SaveAt", "SaveEvery", "SaveFirst", "SaveOnStop", "SavePolicy"],
        "tiers": ["Which"],
    },
    ["committing", "hosts", "housekeeping", "mending", "peers", "removing"],
)
