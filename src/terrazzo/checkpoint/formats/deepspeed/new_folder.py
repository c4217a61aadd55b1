"""The folder of a tag while it is written: of two saves to one tag at most one commits, with its own files only.

In a file system a save writes to a hidden folder of its own, holds a lease beside it, and renames it at the end. In
stores without renaming, all saves write to the tag's folder, and a file in it says that it is incomplete, and whose it
is; deleting that file, on condition that it has not changed, is the commit.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from terrazzo.checkpoint.formats.deepspeed.files import UNFINISHED
from terrazzo.checkpoint.native.commit import check_written
from terrazzo.checkpoint.stores import ABSENT, SMALL, LocalStore, Place, Store
from terrazzo.checkpoint.stores.base import GONE, TEMPORARY, Absent, Lease, Version
from terrazzo.errors import CheckpointError, CheckpointExistsError, ConflictError

_LEASE: Final = ".lease"
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def new_save() -> str:
    """The id of a save, the same for all its ranks."""
    return uuid.uuid4().hex[:12]


class NewFolder:
    """A new folder of a tag, which becomes a checkpoint when it is complete; `store` is for its files.

    Each rank has one. The first calls `prepare`, `commit` and `discard`, and each `check` before it writes a file.
    """

    def __init__(self, target: Place, save_id: str) -> None:
        self.target = target
        self._save_id = save_id
        self._hidden = None if target.local is None else target.parent / f"{self._prefix}{save_id}{TEMPORARY}"
        self._lease: Lease | None = None
        self._marker: Absent | Version = ABSENT
        self.store: Store = target.store if self._hidden is None else self._hidden.store

    @property
    def _prefix(self) -> str:
        return f".{self.target.name}."

    def is_taken(self) -> bool:
        """Whether the folder exists, and is complete."""
        if self._hidden is not None:
            return self.target.exists() or self.target.parent.store.is_link(self.target.name)
        names = self.target.names()
        return bool(names) and UNFINISHED not in names

    def refusal(self) -> CheckpointExistsError:
        """The error if the folder is taken."""
        return CheckpointExistsError(
            f"{self.target} exists, and a checkpoint in DeepSpeed's layout cannot replace another: use another name, "
            "or remove it"
        )

    def prepare(self) -> None:
        """Create the folder, after removing what killed saves have left."""
        if self.is_taken():
            raise self.refusal()
        if self._hidden is not None:
            beside = self.target.parent.store
            beside.prepare()
            self._remove_dead(beside)
            self._lease = beside.lease(f"{self._prefix}{self._save_id}{_LEASE}")
            self.store.prepare()
            return
        self.store.prepare()
        before = self.store.present(UNFINISHED)
        left = self.store.list()
        if left and not self.store.lease_ended(UNFINISHED, max(entry.modified for entry in left)):
            raise CheckpointExistsError(
                f"{self.target} is being written, or its save was killed: use another name, remove it, or wait until "
                "nothing has been written to it for an hour"
            )
        try:
            self._marker = self.store.put(UNFINISHED, self._save_id.encode(), only_if=before)
        except ConflictError as error:
            raise CheckpointExistsError(f"{self.target} is being written by another save") from error
        there = [entry.key for entry in self.store.list() if entry.key != UNFINISHED]
        if there and isinstance(before, Absent):  # another save has committed meanwhile
            self.store.delete_if(UNFINISHED, self._marker)
            self._marker = ABSENT
            raise self.refusal()
        self.store.delete(there)

    def _remove_dead(self, beside: Store) -> None:
        """Remove hidden folders and leases of saves to this tag that have been killed."""
        pattern = re.compile(rf"{re.escape(self._prefix)}([0-9a-f]{{12}})(?:{TEMPORARY}|{_LEASE})")
        signs = {entry.key: entry.modified for entry in beside.list(self._prefix)}
        for name in {*signs, *beside.folders()}:
            match = pattern.fullmatch(name)
            if match is None or beside.is_link(name):
                continue
            lease = f"{self._prefix}{match[1]}{_LEASE}"
            hidden = beside.beneath(f"{self._prefix}{match[1]}{TEMPORARY}")
            dates = [entry.modified for entry in hidden.list()]
            if beside.lease_ended(lease, max([signs.get(lease, 0.0), *dates])):
                shutil.rmtree(hidden.location, ignore_errors=True)
                with suppress(PermissionError):  # it is another user's
                    beside.delete_ended([lease])

    def check(self) -> None:
        """Raise if the folder is not there, or if another save has taken this one for dead."""
        if isinstance(self.store, LocalStore):
            if not self.store.path.is_dir():
                raise CheckpointError(
                    f"{self.store.location} is not there; the folder must be the same for all ranks, and no other save "
                    "to it may have taken this one for dead"
                )
            return
        with suppress(FileNotFoundError):
            if self.store.get(UNFINISHED, SMALL)[0] == self._save_id.encode():
                return
        raise ConflictError(f"{self.target} is being written by another save, which has taken this one for dead")

    def commit(self, files: Sequence[str]) -> None:
        """Commit: all ranks have written their files, which must be here."""
        check_written(self.store, files)
        local = self.target.local
        if local is None or self._hidden is None:
            assert not isinstance(self._marker, Absent)
            self.store.delete_if(UNFINISHED, self._marker)
            return
        assert isinstance(self.store, LocalStore)
        self.store.sync_folder(self.store.path)
        try:
            os.rename(self.store.path, local)
        except OSError as error:
            if error.errno in _TAKEN:  # by another save, meanwhile
                raise self.refusal() from error
            raise
        self.store.sync_folder(local.parent)
        self._release()

    def discard(self) -> None:
        """Remove everything, unless the commit took effect although it raised."""
        if self._hidden is not None:
            shutil.rmtree(str(self._hidden), ignore_errors=True)
            self._release()
        elif isinstance(self._marker, Absent):
            return
        elif self._was_replaced():
            self.store.delete([UNFINISHED])  # the commit, whose answer was lost
        elif self.store.present(UNFINISHED) == self._marker:
            files = [entry.key for entry in self.store.list()]
            self.store.delete([name for name in files if name != UNFINISHED])
            with suppress(ConflictError):  # another save has taken it meanwhile
                self.store.delete_if(UNFINISHED, self._marker)

    def _was_replaced(self) -> bool:
        """Whether a commit has replaced the marker, which is the first half of its removal (`Store.delete_if`)."""
        with suppress(FileNotFoundError):
            return self.store.get(UNFINISHED, SMALL)[0] == GONE
        return False

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
