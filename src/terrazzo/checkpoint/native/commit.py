"""What makes a commit safe, in all formats: the lease of a save, the condition of its commit, and what is removed.

Removed are files that are of no use any more: those of dead saves and of checkpoints that have been replaced.

Several jobs may save to one place, and one of them may have been suspended for a day. So a file is removed only if
- no committed checkpoint names it, and
- the save that it belongs to has ended: its lease is gone, or nobody holds it.

The order matters: first the files are listed, then the leases are read, then the manifest. A save that commits in
between still has its lease, or its manifest is read.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from terrazzo.checkpoint.native.format import MANIFEST, lease_name, save_of
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores.base import (
    ABSENT,
    CLOCK,
    LARGEST,
    LOCK,
    TEMPORARY,
    Absent,
    Entry,
    Lease,
    Store,
    Version,
)
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConflictError,
)

RENEW_SECONDS = 60.0  # far less than what makes a lease an ended one


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


class Commit:
    """A save to a place: its lease, and the condition on which its root replaces the one that is there.

    The root is the file that makes a checkpoint of the others: `manifest.terrazzo`, `.metadata`, an index.
    The lease belongs to the process that took it: a copy of this object, or a pickled one in another process, holds no
    lease.
    """

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self.replacing: Absent | Version = ABSENT  # the root's version when the save began, or as it was put last
        self.lost = False  # whether another save has taken this one for dead
        self._is_put: bool | None = False  # None: a put has raised, and may have taken effect
        self._lease: Lease | None = None
        self._save_id = ""
        self._renewed = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lease": None}

    def begin(self, *, overwrite: bool = True, most: int = LARGEST) -> bytes | bytearray | None:
        """The root that is there, or None. From now on, another save that commits makes `put` fail."""
        self.replacing, self._is_put = ABSENT, False
        try:
            data, self.replacing = self._store.get(self._root, most)
        except FileNotFoundError:
            return None
        if not overwrite:
            raise CheckpointExistsError(
                f"{self._store.location} holds a checkpoint; save elsewhere, or with overwrite=True"
            )
        return data

    def hold(self, save_id: str) -> None:
        """Take the lease of a save: while it is held, no other save removes the files of this one."""
        self.release()
        self._save_id, self._renewed, self.lost = save_id, time.monotonic(), False
        self._lease = self._store.lease(lease_name(save_id))

    def renew(self) -> None:
        """The save goes on: called often, it gives the lease a new date now and then.

        Only a save whose files do not bear its id needs that: a lease is as young as the newest of these.
        """
        now = time.monotonic()
        if self._lease is not None and now - self._renewed >= RENEW_SECONDS:
            self._renewed = now
            with suppress(OSError):  # `is_held` is asked before the commit
                if self.is_held():
                    self._store.renew_lease(lease_name(self._save_id))

    def is_held(self) -> bool:
        """Whether the lease is there: no other save has taken this one for dead."""
        self.lost = self.lost or not self._store.exists(lease_name(self._save_id))
        return not self.lost

    def release(self) -> None:
        """Release the lease, after the save succeeded or failed; does nothing if none is held."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def put(self, data: bytes | memoryview) -> Version:
        """Commit; `ConflictError` if another save has committed since `begin`."""
        self._is_put = None
        try:
            self.replacing = self._store.put(self._root, data, only_if=self.replacing)
        except ConflictError:
            self._is_put = False
            raise
        self._is_put = True
        return self.replacing

    def is_absent(self) -> bool:
        """After the save failed: whether its commit certainly had no effect, so that its files are of no use.

        The reply to a put may be lost, or its last part fail. If the root is not the old one, it may be that of this
        save, or of a later one that shares its files. What cannot be read may be there.
        """
        return self._is_put is False or (self._is_put is None and self._present()[0] == self.replacing)

    def confirm(self, data: bytes | memoryview) -> bool:
        """After `put` raised: whether the root has these bytes all the same, so that the next `put` may replace it."""
        version, present = self._present()
        if version is None or present != data:
            return False
        self.replacing, self._is_put = version, True
        return True

    def _present(self) -> tuple[Absent | Version | None, bytes | bytearray]:
        """The version and the bytes of the root that is there now; None if it cannot be read."""
        try:
            data, version = self._store.get(self._root)
            return version, data
        except FileNotFoundError:
            return ABSENT, b""
        except (OSError, CheckpointError):
            return None, b""


def check_written(store: Store, names: Iterable[str], entries: Sequence[Entry] | None = None) -> None:
    """Raise unless these data files are in the store (`entries`, if it was listed): ranks may have written to folders
    that only have the same path, or another program may have removed files."""
    present = {entry.key for entry in (store.list() if entries is None else entries)}
    for name in names:
        if name not in present:
            raise CheckpointError(
                f"{store.location}: the data file {name} has been written but is not there; the folder must be the "
                f"same for all ranks"
            )


def remove_leftovers(store: Store, named: Collection[str] = (), listed: Sequence[Entry] | None = None) -> list[str]:
    """Remove unused files and return their names; removes nothing if the present manifest cannot be read.

    `named` are files that a committed manifest named. `listed` is an earlier list of the store's files.
    """
    entries = store.list() if listed is None else listed
    temporary = ended(store, temporary_of(entries, [MANIFEST]))

    def used() -> Collection[str] | None:
        try:
            return read_manifest(store).files
        except FileNotFoundError:
            return ()
        except (CheckpointCorruptError, CheckpointFormatError):
            return None

    return remove_ended(store, by_save(entries, save_of), used, named=named, others=temporary)


def by_save(entries: Iterable[Entry], save_of: Callable[[str], str | None]) -> dict[str, list[Entry]]:
    """The files that belong to saves, by the save's id, which `save_of` finds in a file's name."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        save_id = save_of(entry.key)
        if save_id is not None:
            found[save_id].append(entry)
    return found


def remove_ended(
    store: Store,
    saves: Mapping[str, Sequence[Entry]],
    used: Callable[[], Collection[str] | None] = lambda: (),
    *,
    named: Collection[str] = (),
    others: Sequence[str] = (),
) -> list[str]:
    """Remove the files of those saves that have ended, and `others`; returns their names.

    The files were listed before. `used`, which reads which files the committed checkpoint needs (None: that cannot be
    said, so nothing is removed), is called last, and only if there are files to remove that are not `named`.
    """
    gone = [entries for save_id, entries in saves.items() if _has_ended(store, save_id, entries)]
    known = set(named)
    stale = [*others, *(entry.key for entries in gone for entry in entries if entry.key not in known)]
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


def temporary_of(entries: Iterable[Entry], names: Iterable[str]) -> list[Entry]:
    """The files under temporary names that are to replace files of these names, and the locks of these."""
    pattern = re.compile(rf"\.?(?:{'|'.join(map(re.escape, (*names, CLOCK)))})(?:\.[0-9a-f]{{12}}{TEMPORARY}|{LOCK})")
    return [entry for entry in entries if pattern.fullmatch(entry.key)]


def ended(store: Store, entries: Iterable[Entry]) -> list[str]:
    """The names of leases and temporary files that no process holds any more."""
    return [entry.key for entry in entries if store.lease_ended(entry.key, entry.modified)]


def sweep(store: Store, keys: Sequence[str]) -> bool:
    """Remove what ended saves and readers have left; returns whether all could be removed.

    What another user does not let this one remove stays: no save fails for it.
    """
    try:
        store.delete_ended(keys)
    except PermissionError as error:
        LOGGER.warning("%s: what ended saves or readers have left stays: %s", store.location, error)
        return False
    return True
