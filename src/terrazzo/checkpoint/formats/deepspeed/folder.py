"""A new folder of DeepSpeed's files, which becomes a checkpoint when it is complete.

In a file system it is created under another name, and renamed. In stores without renaming, a file in it marks it as
incomplete; removing that file is the commit.
"""

from __future__ import annotations

import os
import shutil
from typing import Final

from terrazzo.checkpoint.stores import ABSENT, LocalStore, Place, Store
from terrazzo.errors import CheckpointExistsError, ConflictError

UNFINISHED: Final = ".unfinished"


class NewFolder:
    """The folder of a tag, for writing; `store` is for its files."""

    def __init__(self, target: Place) -> None:
        self.target = target
        self._hidden = None if target.local is None else target.parent / f".{target.name}.tmp"
        self.store: Store = target.store if self._hidden is None else self._hidden.store

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
        """Create the folder, after removing what a killed save has left."""
        if self.is_taken():
            raise self.refusal()
        if self._hidden is not None:
            if self._hidden.parent.store.is_link(self._hidden.name):
                raise CheckpointExistsError(
                    f"{self._hidden} is a link or a mount point, and nothing is removed through it: remove it"
                )
            shutil.rmtree(str(self._hidden), ignore_errors=True)
            self.store.prepare()
            return
        self.store.prepare()
        left = self.store.list()
        if left and not self.store.lease_ended(UNFINISHED, max(entry.modified for entry in left)):
            raise CheckpointExistsError(
                f"{self.target} is being written, or its save was killed: use another name, remove it, or wait until "
                "nothing has been written to it for an hour"
            )
        self.store.delete([entry.key for entry in left if entry.key != UNFINISHED])
        self.store.delete([UNFINISHED])
        try:
            self.store.put(UNFINISHED, b"", only_if=ABSENT)
        except ConflictError as error:
            raise CheckpointExistsError(f"{self.target} is being written by another save") from error

    def commit(self) -> None:
        """Commit: all files are complete."""
        local = self.target.local
        if local is None or self._hidden is None:
            self.store.delete([UNFINISHED])
            return
        assert isinstance(self.store, LocalStore)
        self.store.sync_folder(self.store.path)
        os.rename(self.store.path, local)
        self.store.sync_folder(local.parent)

    def discard(self) -> None:
        """Remove everything, unless the commit took effect although it raised."""
        if self._hidden is not None:
            shutil.rmtree(str(self._hidden), ignore_errors=True)
        elif self.store.exists(UNFINISHED):
            files = [entry.key for entry in self.store.list()]
            self.store.delete([name for name in files if name != UNFINISHED])
            self.store.delete([UNFINISHED])
