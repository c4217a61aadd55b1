"""Data files as a checkpoint describes them: the error if one is gone, and memory for no more bytes than they have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError

_LARGE: Final = 16 << 20  # bytes: for fewer, asking for the sizes of files is not worth it


def gone(location: str, error: FileNotFoundError) -> CheckpointNotFoundError:
    """The error for a file that the manifest of the checkpoint at `location` names, and that is not there."""
    return CheckpointNotFoundError(
        f"a data file of {location} is gone, though the checkpoint's manifest names it ({error}); was the "
        f"checkpoint replaced or removed while it was read?"
    )


def room_for(store: Store, key: str, nbytes: int) -> memoryview:
    """A buffer for bytes of a file, which a manifest or an index says to have so many."""
    check_room(store, [key], nbytes, key)
    return memoryview(bytearray(nbytes))


def check_room(store: Store, keys: Collection[str], nbytes: int, what: str) -> None:
    """Raise if files together have fewer bytes than `what` is said to have."""
    if nbytes <= _LARGE:
        return
    try:
        there = sum([store.stat(key).size for key in keys])
    except FileNotFoundError as error:
        raise gone(store.location, error) from error
    if there < nbytes:
        raise CheckpointCorruptError(f"{store.location}: {what} cannot have {nbytes} bytes: its files have {there}")
