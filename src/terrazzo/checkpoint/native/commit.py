"""What makes a commit safe, in all formats: the lease of a save, the condition of its commit, and what is removed.

Removed are files that are of no use any more: those of dead saves and of checkpoints that have been replaced.

Several jobs may save to one place, and one of them may have been suspended for a day. So a file is removed only if
- no committed checkpoint names it, and
- the save that it belongs to has ended: its lease is gone, or nobody holds it.

The order matters: first the files are listed, then the leases are read, then the manifest. A save that commits in
between still has its lease, or its manifest is read.

Where leases end by their age, a save may go on after its lease has ended, and commit while its files are removed. So
before these are removed, the manifest is replaced by one that says the same (a fence), and the late commit fails,
because it replaces another version. And the leases are removed first, before it is looked once more which manifest is
there; and a save looks for its lease after its commit. So also where there is no manifest to replace, or a store does
not replace atomically, one sees the other: the files stay, or the save raises an error and takes its manifest back.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from terrazzo.checkpoint.native.format import MANIFEST, lease_name, save_of
from terrazzo.checkpoint.native.root import Root, fenced_root
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores.base import (
    ABSENT,
    CLOCK,
    GONE,
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
SAVER, READER, REMOVER = "save-", "read-", "remove-"  # how the names of leases begin
LEASE = ".lease"


def read_manifest(store: Store) -> Root:
    """The root of the checkpoint that is valid now; raises `FileNotFoundError` if there is none."""
    data, _ = store.get(MANIFEST)
    if data == GONE:
        raise FileNotFoundError(f"{store.location}: the checkpoint was removed")
    return Root(data, store.location)


def has_manifest(store: Store) -> bool:
    """Whether there is a checkpoint, which may be damaged: a manifest that was not removed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return store.stat(MANIFEST).size != len(GONE) or store.get(MANIFEST)[0] != GONE
    return False


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
        self._was_removed = False  # whether the root was one that is removed
        self.lost = False  # whether another save has taken this one for dead
        self._before: bytes | bytearray | None = None  # the root's bytes when the save began
        self._is_put: bool | None = False  # None: a put has raised, and may have taken effect
        self._lease: Lease | None = None
        self._save_id = ""
        self._renewed = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lease": None}

    def begin(self, *, overwrite: bool = True, most: int = LARGEST) -> bytes | bytearray | None:
        """The root that is there, or None. From now on, another save that commits makes `put` fail."""
        self.replacing, self._before = ABSENT, None
        self._is_put = self._was_removed = False
        try:
            data, self.replacing = self._store.get(self._root, most)
        except FileNotFoundError:
            return None
        if data == GONE:
            self._was_removed = True
            return None
        self._before = data
        if not overwrite:
            raise CheckpointExistsError(
                f"{self._store.location} holds a checkpoint; save elsewhere, or with overwrite=True"
            )
        return data

    def hold(self, save_id: str) -> None:
        """Take the lease of a save: while it is held, no other save removes the files of this one."""
        self.release()
        self._save_id, self._renewed, self.lost = save_id, time.monotonic(), False
        self._store.prepare()  # again: a removal may have removed the empty folder
        self._lease = self._store.lease(lease_name(save_id))
        if self._was_removed and is_held(self._store, REMOVER):  # which is about to delete the root, whoever put it
            self.release()
            raise ConflictError(f"{self._store.location} is being removed by another job: save there later")

    def renew(self) -> None:
        """The save goes on: called often, it gives the lease a new date now and then.

        Only a save whose files do not bear its id needs that: a lease is as young as the newest of these.
        """
        now = time.monotonic()
        if self._lease is not None and now - self._renewed >= RENEW_SECONDS:
            self._renewed = now
            try:
                if not self.lost:
                    self._store.renew_lease(lease_name(self._save_id))
            except (FileNotFoundError, ConflictError):  # another save has removed it
                self.lost = True
            except OSError:  # `is_held` is asked before the commit
                pass

    def is_held(self) -> bool:
        """Whether the lease is there: no other save has taken this one for dead."""
        self.lost = self.lost or not self._store.exists(lease_name(self._save_id))
        return not self.lost

    def check_alive(self, names: Iterable[str], listed: Sequence[Entry]) -> None:
        """Raise unless the lease and these data files of this save are among those listed.

        The lease is gone if another save has taken this one for dead. Files alone are gone if ranks wrote to folders
        that only have the same path, or another program has removed them.
        """
        present = {entry.key for entry in listed}
        if self._save_id and (self.lost or lease_name(self._save_id) not in present):
            raise self._taken_for_dead()
        check_written(self._store, names, listed)

    def check_committed(self) -> None:
        """After `put`: take the root back and raise if another save has taken this one for dead meanwhile."""
        if self._save_id and self._store.leases_expire() and not self.is_held():
            self._take_back()
            raise self._taken_for_dead()

    def _taken_for_dead(self) -> ConflictError:
        self.lost = True
        return ConflictError(
            f"{self._store.location}: another save has taken this one for dead, because its lease had expired, and "
            f"removed {lease_name(self._save_id)} and maybe more, so this checkpoint does not count. Let only one job "
            "save there, or save again"
        )

    def _take_back(self) -> None:
        """Put the root that was there, or none, unless another save has committed since."""
        with suppress(ConflictError):
            if self._before is not None:
                self._store.put(self._root, memoryview(self._before), only_if=self.replacing)
            elif not isinstance(self.replacing, Absent):
                self._store.delete_if(self._root, self.replacing)
            self._is_put = False

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

    def sweep(
        self,
        listed: Sequence[Entry],
        saves: Mapping[str, Sequence[Entry]],
        used: Callable[[bytes | bytearray | None], Collection[str] | None],
        fenced: Callable[[bytes | bytearray], bytes] | None = None,
        *,
        named: Collection[str] = (),
        others: Sequence[str] = (),
    ) -> list[str]:
        """Remove the files of those saves that have ended, and `others`; returns their names.

        The root is read last, and only if there are files to remove that are not `named`.

        Args:
            listed: The store's files, listed before.
            saves: Those that belong to saves of this format, by the save's id.
            used: Which files are needed if this is the root, or there is none; None: that cannot be said, so nothing is
                removed.
            fenced: Another root that says the same; None: there can be none, so while there is a root, the files of
                saves whose lease has expired stay until this save has committed.
            named: Files that are known to be needed.
            others: Files of no save.
        """
        store = self._store
        gone = ended_saves(store, listed, saves)
        known = {*named, *others}
        stale = [entry.key for entries in gone.values() for entry in entries if entry.key not in known]
        if not stale and not others:
            return []
        data, version = self._read()
        needed = used(data)
        if needed is None:
            return []
        needed = set(needed)
        if store.leases_expire():  # of a save that has just committed, which has not looked for its lease yet
            needed |= {lease_name(each) for each in gone if any(each in name for name in needed)}
        stale = [key for key in stale if key not in needed]
        leases = [key for key in map(lease_name, gone) if key in stale]
        if stale and store.leases_expire() and (leases or self._is_put is False):
            needed = self._fence(data, version, leases, used, fenced)
            stale = [] if needed is None else [key for key in stale if key not in set(needed)]
        stale = [*others, *stale]
        return stale if stale and sweep(store, stale) else []

    def _fence(
        self,
        data: bytes | bytearray | None,
        version: Absent | Version,
        leases: Sequence[str],
        used: Callable[[bytes | bytearray | None], Collection[str] | None],
        fenced: Callable[[bytes | bytearray], bytes] | None,
    ) -> Collection[str] | None:
        """Remove these leases, which have expired. What is needed now, if no save that had one of them can commit from
        now on and not notice that; else None."""
        if data is not None and self._is_put is False:  # else this save's commit was the fence
            if fenced is None:
                return None
            fence = fenced(data)
            try:
                new = self._store.put(self._root, fence, only_if=version)
            except ConflictError:  # it has just committed, or another save has
                return None
            if self.replacing == version:
                self.replacing, self._before = new, fence
            version = new
        if not sweep(self._store, leases):
            return None
        data, now = self._read()
        return used(data) if now == version else None

    def _read(self) -> tuple[bytes | bytearray | None, Absent | Version]:
        try:
            data, version = self._store.get(self._root)
            return None if data == GONE else data, version
        except FileNotFoundError:
            return None, ABSENT

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


def remove_leftovers(
    store: Store,
    named: Collection[str] = (),
    listed: Sequence[Entry] | None = None,
    commit: Commit | None = None,
) -> list[str]:
    """Remove unused files and return their names; removes nothing if the present manifest cannot be read.

    `named` are files that a committed manifest named. `listed` is an earlier list of the store's files. `commit` is
    that of the caller's own save.
    """
    entries = store.list() if listed is None else listed
    temporary = ended(store, temporary_of(entries, [MANIFEST]))

    def used(data: bytes | bytearray | None) -> Collection[str] | None:
        try:
            return () if data is None else Root(data, store.location).files
        except (CheckpointCorruptError, CheckpointFormatError):
            return None

    def fenced(data: bytes | bytearray) -> bytes:
        return fenced_root(Root(data, store.location))

    commit = commit or Commit(store, MANIFEST)
    return commit.sweep(entries, by_save(entries, save_of), used, fenced, named=named, others=temporary)


def by_save(entries: Iterable[Entry], save_of: Callable[[str], str | None]) -> dict[str, list[Entry]]:
    """The files that belong to saves, by the save's id, which `save_of` finds in a file's name."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        save_id = save_of(entry.key)
        if save_id is not None:
            found[save_id].append(entry)
    return found


def ended_saves(
    store: Store, listed: Sequence[Entry], saves: Mapping[str, Sequence[Entry]]
) -> dict[str, Sequence[Entry]]:
    """Those of the saves that have ended: their lease is gone, or no process holds it."""
    present = {entry.key for entry in listed}

    def has_ended(save_id: str) -> bool:
        lease = lease_name(save_id)
        # Files of every format bear the save's id.
        return lease not in present or store.lease_ended(lease, max(e.modified for e in listed if save_id in e.key))

    return {save_id: entries for save_id, entries in saves.items() if has_ended(save_id)}


def temporary_of(entries: Iterable[Entry], names: Iterable[str]) -> list[Entry]:
    """The files under temporary names that are to replace files of these names, and the locks of these."""
    pattern = re.compile(rf"\.?(?:{'|'.join(map(re.escape, (*names, CLOCK)))})(?:\.[0-9a-f]{{12}}{TEMPORARY}|{LOCK})")
    return [entry for entry in entries if pattern.fullmatch(entry.key)]


def ended(store: Store, entries: Iterable[Entry]) -> list[str]:
    """The names of leases and temporary files that no process holds any more."""
    return [entry.key for entry in entries if store.lease_ended(entry.key, entry.modified)]


def leases(store: Store, kind: str) -> list[Entry]:
    """The leases of a kind: `SAVER`, `READER` or `REMOVER`."""
    return [entry for entry in store.list(kind) if entry.key.endswith(LEASE)]


def is_held(store: Store, kind: str = READER) -> bool:
    """Whether a process holds a lease of a kind: reads the checkpoint, or saves or removes it."""
    there = leases(store, kind)
    return len(ended(store, there)) < len(there)


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
