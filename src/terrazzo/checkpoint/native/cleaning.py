"""Which files of a folder are of no use any more: those of dead saves and of checkpoints that have been replaced.

Several jobs may save to one place, and one of them may have been suspended for a day. So a file is removed only if
- no committed checkpoint names it, and
- the save that it belongs to has ended: its lease is gone, or nobody holds it.

The order matters: first the files are listed, then the leases are read, then the manifest. A save that commits in
between still has its lease, or its manifest is read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from terrazzo.checkpoint.native.format import MANIFEST, is_temporary, save_of
from terrazzo.checkpoint.native.leases import has_ended
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.stores.base import Entry, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError

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


def remove_leftovers(store: Store, named: Collection[str] = (), listed: Sequence[Entry] | None = None) -> list[str]:
    """Remove unused files and return their names; removes nothing if the present manifest cannot be read.

    The present manifest is read only if there are files to remove: of saves that have ended, and not in `named`, the
    files that a committed manifest named. `listed` is an earlier list of the store's files.
    """
    by_save: dict[str, list[Entry]] = defaultdict(list)
    stale = []
    for entry in store.list() if listed is None else listed:
        save_id = save_of(entry.key)
        if save_id is not None:
            by_save[save_id].append(entry)
        elif is_temporary(entry.key) and store.lease_ended(entry.key, entry.modified):
            stale.append(entry.key)
    ended = [save_id for save_id, entries in by_save.items() if has_ended(store, save_id, entries)]
    known = set(named)
    stale += [entry.key for save_id in ended for entry in by_save[save_id] if entry.key not in known]
    if not stale:
        return []
    try:
        used = set(read_manifest(store).data_files)
    except FileNotFoundError:
        used = set()
    except (CheckpointCorruptError, CheckpointFormatError):
        return []
    stale = [key for key in stale if key not in used]
    return stale if sweep(store, stale) else []


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
