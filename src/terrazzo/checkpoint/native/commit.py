"""What makes a commit safe, in all formats: the lease of a save, whether a commit took effect, and what is removed.

Removed are files that are of no use any more: those of dead saves and of checkpoints that have been replaced.

Several jobs may save to one place, and one of them may have been suspended for a day. So a file is removed only if
- no committed checkpoint names it, and
- the save that it belongs to has ended: its lease is gone, or nobody holds it.

The order matters: first the files are listed, then the leases are read, then the manifest. A save that commits in
between still has its lease, or its manifest is read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from terrazzo.checkpoint.native.format import MANIFEST, is_temporary, lease_name, save_of
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.stores.base import Entry, Lease, Store
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
)

LOGGER = logging.getLogger("terrazzo.checkpoint")


def read_manifest(store: Store) -> Root:
    """The root of the checkpoint that is valid now; raises `FileNotFoundError` if there is none."""
    data, _ = store.get(MANIFEST)
    return Root(data, store.location)


def committed_manifest(store: Store) -> Root:
    """Like `read_manifest`, but raises `CheckpointNotFoundError`, which says what is missing."""
    try:
        return read_manifest(store)
    except FileNotFoundError as error:
        where = f"{store.location} (no {MANIFEST})"
        raise CheckpointNotFoundError(f"there is no committed checkpoint at {where}") from error


class SaveLease:
    """A save's lease, from the moment that it is taken until it is released.

    It belongs to the process that took it: a copy of this object, or a pickled one in another process, holds no lease.
    """

    def __init__(self) -> None:
        self._lease: Lease | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_lease": None}

    def take(self, store: Store, save_id: str) -> None:
        """Take the lease of a save to this store: while it is held, no other save removes the files of this one."""
        self.release()
        self._lease = store.lease(lease_name(save_id))

    def release(self) -> None:
        """Release the lease, after the save succeeded or failed; does nothing if none is held."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()


def is_absent(look: Callable[[], bool]) -> bool:
    """After a commit raised: whether it certainly had no effect, so that its files are of no use.

    `look` reads what the commit would have put, and returns whether something else is there. What cannot be read may be
    there: the reply to a put may be lost, or its last part fail.
    """
    try:
        return look()
    except FileNotFoundError:
        return True
    except (OSError, CheckpointError):
        return False


def remove_leftovers(store: Store, named: Collection[str] = (), listed: Sequence[Entry] | None = None) -> list[str]:
    """Remove unused files and return their names; removes nothing if the present manifest cannot be read.

    `named` are files that a committed manifest named. `listed` is an earlier list of the store's files.
    """
    by_save: dict[str, list[Entry]] = defaultdict(list)
    temporary = []
    for entry in store.list() if listed is None else listed:
        save_id = save_of(entry.key)
        if save_id is not None:
            by_save[save_id].append(entry)
        elif is_temporary(entry.key) and store.lease_ended(entry.key, entry.modified):
            temporary.append(entry.key)

    def used() -> Collection[str] | None:
        try:
            return read_manifest(store).data_files
        except FileNotFoundError:
            return ()
        except (CheckpointCorruptError, CheckpointFormatError):
            return None

    return remove_ended(store, by_save, used, named=named, others=temporary)


def remove_ended(
    store: Store,
    by_save: Mapping[str, Sequence[Entry]],
    used: Callable[[], Collection[str] | None],
    *,
    named: Collection[str] = (),
    others: Sequence[str] = (),
) -> list[str]:
    """Remove the files of those saves that have ended, and `others`; returns their names.

    The files were listed before. `used`, which reads which files the committed checkpoint needs (None: that cannot be
    said, so nothing is removed), is called last, and only if there are files to remove that are not `named`.
    """
    ended = [entries for save_id, entries in by_save.items() if _has_ended(store, save_id, entries)]
    known = set(named)
    stale = [*others, *(entry.key for entries in ended for entry in entries if entry.key not in known)]
    if not stale:
        return []
    needed = used()
    if needed is None:
        return []
    needed = set(needed)
    stale = [key for key in stale if key not in needed]
    return stale if sweep(store, stale) else []


def _has_ended(store: Store, save_id: str, entries: Sequence[Entry]) -> bool:
    """Whether the save that wrote these files has ended: its lease is gone, or no process holds it."""
    lease = lease_name(save_id)
    if all(entry.key != lease for entry in entries):
        return True
    return store.lease_ended(lease, max(entry.modified for entry in entries))


def sweep(store: Store, keys: Sequence[str]) -> bool:
    """Remove what ended saves and readers have left; returns whether all could be removed.

    What another user does not let this one remove stays: no save fails for it.
    """
    try:
        store.delete(keys)
    except PermissionError as error:
        LOGGER.warning("%s: what ended saves or readers have left stays: %s", store.location, error)
        return False
    return True
