"""What a save finds where it goes, and what it holds there until it ends; on the coordinator.

A lease shows that the save is alive. The mark is for one save at a time: who holds it may use the usual names of
shards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Final

from terrazzo.checkpoint.formats.huggingface import files
from terrazzo.checkpoint.native.commit import Commit, by_save, ended, remove_ended, temporary_of
from terrazzo.checkpoint.native.format import SEAL, lease_name, save_of
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import ABSENT, SMALL, Absent, Entry, LocalStore, Store, Version
from terrazzo.errors import CheckpointCorruptError, CheckpointExistsError, ConflictError

_SAVE_ID: Final = "[0-9a-f]{12}"
REFRESH_SECONDS: Final = 60.0  # far less than what makes a lease an ended one
_PART: Final = re.compile(rf"\.hf-(?P<save>{_SAVE_ID})-[0-9]{{5}}\.tmp")


def part_name(save_id: str, number: int) -> str:
    """A file that ranks are writing to.

    >>> part_name("0123456789ab", 2)
    '.hf-0123456789ab-00002.tmp'
    """
    return f".hf-{save_id}-{number:05d}.tmp"


def _save_of(name: str) -> str | None:
    """The save that a file that is written to belongs to, or a lease, which may be of a save in another format."""
    found = _PART.fullmatch(name)
    if found is not None:
        return found["save"]
    save_id = save_of(name)
    return save_id if save_id is not None and name == lease_name(save_id) else None


def parts_of(store: Store, save_id: str) -> list[str]:
    """The files that ranks have begun to write in a save."""
    return [e.key for e in store.list(".hf-") if (found := _PART.fullmatch(e.key)) and found["save"] == save_id]


class Claim:
    """One save's claim to a place.

    Args:
        store: The place.
        stem: What the names of the checkpoint's files begin with.
        beside: Other files that the save will put there.
        save_id: Of this save.
        overwrite: Whether a checkpoint that is there may be replaced.

    Attributes:
        index: Commits by putting the index.
        usual_names: Whether this save may call its shards as everybody does.
    """

    def __init__(self, store: Store, stem: str, beside: Sequence[str], save_id: str, *, overwrite: bool) -> None:
        self._store = store
        self._stem = stem
        self._id = save_id
        self._index, self._single_name = files.index_name(stem), files.single_name(stem)
        self._mark = f".{self._single_name}.saving"
        # First of all, because a save that commits from now on conflicts with this one.
        self.index = Commit(store, self._index)
        self.index.begin(overwrite=overwrite, most=SMALL)
        self._single = self._stat(self._single_name)
        if not overwrite and self._single is not None:
            raise CheckpointExistsError(f"{store.location} holds a checkpoint; save elsewhere, or with overwrite=True")
        self._replaced = self._shards_named()
        self._remove_leftovers((self._index, self._mark, *beside))
        self.index.hold(save_id)
        self._shown = time.monotonic()
        self._marked = False
        self.lost = False  # whether another save has taken this one for dead
        try:
            with suppress(ConflictError):
                store.put(self._mark, save_id.encode(), only_if=ABSENT)
                self._marked = True
            self.usual_names = self._marked and not self._shards()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The save has ended, one way or the other."""
        if self._marked:
            self._marked = False
            with suppress(OSError):  # a later save removes it
                self._store.delete([self._mark])
        self.index.release()

    def show_life(self) -> None:
        """The save goes on: called often, it makes the lease younger now and then."""
        now = time.monotonic()
        if now - self._shown < REFRESH_SECONDS:
            return
        self._shown = now
        with suppress(OSError):  # `check_alive` raises before the commit if another save has removed the lease
            self._store.renew_lease(lease_name(self._id))

    def check_alive(self, written: Sequence[str]) -> None:
        """Raise if another save has taken this one for dead, and what it held or these files of its own away."""
        try:
            held = not self._marked or bytes(self._store.get(self._mark, SMALL)[0]) == self._id.encode()
        except FileNotFoundError:
            held = False
        gone = sorted(set(written).difference(entry.key for entry in self._store.list(self._stem)))
        if held and not gone:
            return
        self.lost = True
        self._marked = self._marked and held
        raise ConflictError(
            f"{self._store.location}: another save has taken this one for dead and removed "
            f"{', '.join(gone) or self._mark}; its files do not count. Have one job save to one place, or save again"
        )

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Where one save after the other commits, as far as the store has locks."""
        with self._store.locked(self._single_name) if isinstance(self._store, LocalStore) else nullcontext():
            yield

    def check_unchanged(self) -> None:
        """Raise if another save has committed a checkpoint there."""
        if self._stat(self._single_name) != self._single:
            raise self._store.conflict(self._single_name)
        if self._index_version() != self.index.replacing:
            raise self._store.conflict(self._index)

    def remove_replaced(self, kept: Sequence[str], index: Version | None = None) -> None:
        """After the commit: the checkpoint that was there, and shards that nothing names.

        Without locks another save may have committed since `check_unchanged`. Its files stay, and the save whose
        checkpoint is hidden by the other raises, so there is a checkpoint whatever the order.

        Args:
            kept: The files of the new checkpoint.
            index: The version of its index; None: it is one file.
        """
        try:
            if index is None:
                names = [self._index]
                if self._index_version() != self.index.replacing:
                    if self._stat(self._single_name) is None:
                        raise self._store.conflict(self._index)
                    return  # it is hidden by this save's file: theirs is the error
            else:
                names = [self._single_name]
                if self._stat(self._single_name) != self._single:
                    raise self._store.conflict(self._single_name)
            others = set() if self._others_save() else self._shards()
            self._store.delete([*names, SEAL, *sorted((self._replaced | others) - set(kept))])
            if index is not None and self._index_version() != index:
                raise self._store.conflict(self._index)
        except ConflictError:
            raise
        except OSError as error:
            # The only file of the old checkpoint hides the new one.
            if index is not None and self._stat(self._single_name) is not None:
                raise
            LOGGER.warning("%s: files of the replaced checkpoint could not be removed: %s", self._store.location, error)

    # -------------------------------------------------------------- details

    def _index_version(self) -> Absent | Version:
        return self._store.present(self._index)

    def _shards(self) -> set[str]:
        return {entry.key for entry in self._store.list(self._stem) if files.is_shard(entry.key, self._stem)}

    def _shards_named(self) -> set[str]:
        """The files that the index names that is there now."""
        if isinstance(self.index.replacing, Absent):
            return set()
        try:
            named = set(files.read_index(self._store, self._index).values())
        except (CheckpointCorruptError, FileNotFoundError):
            return set()
        return {name for name in named if files.is_shard(name, self._stem)}

    def _others_save(self) -> bool:
        """Whether another save to this place is under way: its shards are not named yet."""
        leases = [entry for entry in self._store.list("save-") if _save_of(entry.key) not in (None, self._id)]
        return len(ended(self._store, leases)) < len(leases)

    def _remove_leftovers(self, keys: Sequence[str]) -> None:
        """What saves left that were killed."""
        entries = self._store.list()
        stale = ended(self._store, temporary_of(entries, keys))  # a put that is alive locks its file
        for mark in (entry for entry in entries if entry.key == self._mark):
            with suppress(FileNotFoundError):
                holder = bytes(self._store.get(self._mark, SMALL)[0]).decode(errors="replace")
                known = re.fullmatch(_SAVE_ID, holder) is not None
                if not known or self._store.lease_ended(lease_name(holder), mark.modified):
                    stale.append(self._mark)
        remove_ended(self._store, by_save(entries, _save_of), others=stale)

    def _stat(self, name: str) -> Entry | None:
        try:
            return self._store.stat(name)
        except FileNotFoundError:
            return None
