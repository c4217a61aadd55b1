"""What a save finds where it goes, and what it holds there until it ends; on the coordinator.

The index is committed as the root of every format. What is of this format alone: one file is a checkpoint without an
index, and hides that of an index beside it; and a save that is the only one there, where no shards are, may call its
shards as everybody does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from terrazzo.checkpoint.formats.huggingface.layout import index_name, is_shard, read_index, single_name
from terrazzo.checkpoint.native.commit import Commit, by_save, ended, ended_saves, sweep, temporary_of
from terrazzo.checkpoint.native.format import SEAL, lease_name, save_of
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import SMALL, Absent, Entry, LocalStore, Store, Version
from terrazzo.errors import CheckpointCorruptError, CheckpointExistsError, ConflictError

_PART: Final = re.compile(r"\.hf-(?P<save>[0-9a-f]{12})-[0-9]{5}\.tmp")


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


class Replacing:
    """What one save replaces, on the coordinator.

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
        self._index, self._single_name = index_name(stem), single_name(stem)
        # First of all, because a save that commits from now on conflicts with this one.
        self.index = Commit(store, self._index)
        self.index.begin(overwrite=overwrite, most=SMALL)
        self._single = self._stat(self._single_name)
        if not overwrite and self._single is not None:
            raise CheckpointExistsError(f"{store.location} holds a checkpoint; save elsewhere, or with overwrite=True")
        self._replaced = self._shards_named()
        entries = store.list()
        temporary = temporary_of(entries, (self._index, *beside))  # a put that is alive locks its file
        # A save whose files are removed before they get their names cannot give them these, and so cannot commit.
        gone = ended_saves(store, entries, by_save(entries, _save_of)).values()
        sweep(store, [*ended(store, temporary), *(entry.key for of_save in gone for entry in of_save)])
        self.index.hold(save_id)
        try:
            # After the lease, so that of two saves which begin together at least one sees the other's.
            self.usual_names = not self._others_save() and not self._shards()
        except BaseException:
            self.index.release()
            raise

    def check_alive(self, written: Sequence[str]) -> None:
        """Raise if another save has taken this one for dead, and its lease or these files of its own away."""
        gone = sorted(set(written).difference(entry.key for entry in self._store.list(self._stem)))
        if self.index.is_held() and not gone:
            return
        self.index.lost = True
        raise ConflictError(
            f"{self._store.location}: another save has taken this one for dead and removed "
            f"{', '.join(gone) or lease_name(self._id)}; its files do not count. Have one job save to one place, or "
            f"save again"
        )

    def committing(self) -> AbstractContextManager[object]:
        """Where one save after the other commits, as far as the store has locks."""
        return self._store.locked(self._single_name) if isinstance(self._store, LocalStore) else nullcontext()

    def check_unchanged(self) -> None:
        """Raise if another save has committed a checkpoint there."""
        if self._stat(self._single_name) != self._single:
            raise self._store.conflict(self._single_name)
        if self._store.present(self._index) != self.index.replacing:
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
                if self._store.present(self._index) != self.index.replacing:
                    if self._stat(self._single_name) is None:
                        raise self._store.conflict(self._index)
                    return  # it is hidden by this save's file: theirs is the error
            else:
                names = [self._single_name]
                if self._stat(self._single_name) != self._single:
                    raise self._store.conflict(self._single_name)
            others = set() if self._others_save() else self._shards()
            self._store.delete([*names, SEAL, *sorted((self._replaced | others) - set(kept))])
            if index is not None and self._store.present(self._index) != index:
                raise self._store.conflict(self._index)
        except ConflictError:
            raise
        except OSError as error:
            # The only file of the old checkpoint hides the new one.
            if index is not None and self._stat(self._single_name) is not None:
                raise
            LOGGER.warning("%s: files of the replaced checkpoint could not be removed: %s", self._store.location, error)

    # -------------------------------------------------------------- details

    def _shards(self) -> set[str]:
        return {entry.key for entry in self._store.list(self._stem) if is_shard(entry.key, self._stem)}

    def _shards_named(self) -> set[str]:
        """The files that the index names that is there now."""
        if isinstance(self.index.replacing, Absent):
            return set()
        try:
            named = set(read_index(self._store, self._index).values())
        except (CheckpointCorruptError, FileNotFoundError):
            return set()
        return {name for name in named if is_shard(name, self._stem)}

    def _others_save(self) -> bool:
        """Whether another save to this place is under way: its shards are not named yet."""
        leases = [entry for entry in self._store.list("save-") if _save_of(entry.key) not in (None, self._id)]
        return len(ended(self._store, leases)) < len(leases)

    def _stat(self, name: str) -> Entry | None:
        try:
            return self._store.stat(name)
        except FileNotFoundError:
            return None
