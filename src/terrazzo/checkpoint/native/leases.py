"""The lease by which a save shows that it is alive: for the writers of all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.checkpoint.native.format import lease_name
from terrazzo.checkpoint.stores.base import Entry, Lease, Store


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


def has_ended(store: Store, save_id: str, entries: Sequence[Entry]) -> bool:
    """Whether the save that wrote these files has ended: its lease is gone, or no process holds it."""
    lease = lease_name(save_id)
    if all(entry.key != lease for entry in entries):
        return True
    return store.lease_ended(lease, max(entry.modified for entry in entries))
