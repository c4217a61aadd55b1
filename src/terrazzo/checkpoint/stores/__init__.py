"""Stores: where the bytes of a checkpoint are. One interface, and a module for each kind of store."""

from terrazzo.checkpoint.stores.base import (
    ABSENT,
    LARGEST,
    SMALL,
    Absent,
    Capabilities,
    Entry,
    GrowingUpload,
    Lease,
    MemoryUpload,
    Request,
    ScatteredUpload,
    Store,
    Upload,
    Version,
    check_size,
)
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.checkpoint.stores.memory import MemoryStore
from terrazzo.checkpoint.stores.places import Place, is_url, store_at

__all__ = [
    "ABSENT",
    "LARGEST",
    "SMALL",
    "Absent",
    "Capabilities",
    "Entry",
    "GrowingUpload",
    "Lease",
    "LocalStore",
    "MemoryStore",
    "MemoryUpload",
    "Place",
    "Request",
    "ScatteredUpload",
    "Store",
    "Upload",
    "Version",
    "check_size",
    "is_url",
    "store_at",
]
