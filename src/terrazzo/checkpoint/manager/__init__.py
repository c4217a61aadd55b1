"""Which steps of a run are saved, and which checkpoints are kept: `CheckpointManager`, `Save` and `Keep`."""

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.checkpoint.manager.manager import CheckpointManager
    from terrazzo.checkpoint.manager.records import Record
    from terrazzo.checkpoint.manager.selection import Best, Keep, Save
    from terrazzo.checkpoint.manager.tiers import Which

__all__ = ["Best", "CheckpointManager", "Keep", "Record", "Save", "Which"]

__getattr__, __dir__ = late(__name__, ["committing", "hosts", "housekeeping"])
