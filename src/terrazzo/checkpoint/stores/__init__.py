"""Where the bytes of a checkpoint live: one small interface, one file per kind of place."""

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    Absent,
    Capabilities,
    Entry,
    Lease,
    MemoryUpload,
    ReadFile,
    Request,
    Store,
    Upload,
    Version,
)
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.checkpoint.stores.memory import MemoryStore
from terrazzo.checkpoint.stores.places import is_url, store_at

__all__ = [
    "ABSENT",
    "Absent",
    "Capabilities",
    "Entry",
    "Lease",
    "LocalStore",
    "MemoryStore",
    "MemoryUpload",
    "ReadFile",
    "Request",
    "Store",
    "Upload",
    "Version",
    "is_url",
    "store_at",
]
