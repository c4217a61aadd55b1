"""Where the bytes of a checkpoint live: one small interface, one file per kind of place."""

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    Absent,
    Capabilities,
    Entry,
    Lease,
    ReadFile,
    Request,
    Store,
    Upload,
    Version,
)
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.checkpoint.stores.memory import MemoryStore

__all__ = [
    "ABSENT",
    "Absent",
    "Capabilities",
    "Entry",
    "Lease",
    "LocalStore",
    "MemoryStore",
    "ReadFile",
    "Request",
    "Store",
    "Upload",
    "Version",
]
