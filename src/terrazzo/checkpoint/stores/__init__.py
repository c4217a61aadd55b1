"""Where the bytes of a checkpoint live: one small interface, one file per kind of place."""

from terrazzo.checkpoint.stores.base import ReadFile, Store, WriteFile
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.checkpoint.stores.memory import MemoryStore

__all__ = ["LocalStore", "MemoryStore", "ReadFile", "Store", "WriteFile"]
