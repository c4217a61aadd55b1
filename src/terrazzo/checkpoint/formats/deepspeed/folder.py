"""A folder of DeepSpeed's files that is a checkpoint once it is complete.

In a file system it is made under another name, and renamed.  Where nothing can be renamed, a file in it says that it
is not complete; taking that away is the commit.
"""

from __future__ import annotations

import os
import shutil
from typing import Final

from terrazzo.checkpoint.stores import ABSENT, LocalStore, Place, Store
from terrazzo.errors import CheckpointExistsError, ConflictError

UNFINISHED: Final = ".unfinished"


class NewFolder:
    """A tag's folder that is about to be written; `store` is for its files."""

    def __init__(self, target: Place) -> None:
        self.target = target
        self._hidden = None if target.local is None else target.parent / f".{target.name}.tmp"
        self.store: Store = target.store if self._hidden is None else self._hidden.store

    def is_taken(self) -> bool:
        """Whether there is a checkpoint, or anything else that is whole."""
        if self._hidden is not None:
            return self.target.exists()
        names = self.target.names()
        return bool(names) and UNFINISHED not in names

    def refusal(self) -> CheckpointExistsError:
        """What to raise then."""
        return CheckpointExistsError(
            f"{self.target} exists; DeepSpeed's layout is not written over a checkpoint: name another, or remove it"
        )

    def prepare(self) -> None:
        """Begin, without what somebody who was killed has left."""
        if self.is_taken():
            raise self.refusal()
        if self._hidden is not None:
            shutil.rmtree(str(self._hidden), ignore_errors=True)
            self.store.prepare()
            return
        self.store.prepare()
        left = self.store.list()
        if left and not self.store.lease_ended(UNFINISHED, max(entry.modified for entry in left)):
            raise CheckpointExistsError(
                f"{self.target} is being written, or was when its writer died: name another, remove it, or wait until "
                "nothing has been written to it for an hour"
            )
        self.store.delete([entry.key for entry in left if entry.key != UNFINISHED])
        self.store.delete([UNFINISHED])
        try:
            self.store.put(UNFINISHED, b"", only_if=ABSENT)
        except ConflictError as error:
            raise CheckpointExistsError(f"{self.target} is being written by somebody else") from error

    def commit(self) -> None:
        """All files are there."""
        local = self.target.local
        if local is None or self._hidden is None:
            self.store.delete([UNFINISHED])
            return
        assert isinstance(self.store, LocalStore)
        self.store.sync_folder(self.store.path)
        os.rename(self.store.path, local)
        self.store.sync_folder(local.parent)

    def discard(self) -> None:
        """Give up: nothing of it stays."""
        if self._hidden is not None:
            shutil.rmtree(str(self._hidden), ignore_errors=True)
        else:
            files = [entry.key for entry in self.store.list()]
            self.store.delete([name for name in files if name != UNFINISHED])
            self.store.delete([UNFINISHED])
