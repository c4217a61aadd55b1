"""Hold a checkpoint while it is read, and remove checkpoints that no reader holds.

A reader first writes its lease into the checkpoint's folder, then looks for a lease of a removal; a removal writes its
lease first, then looks for readers. If both happen at the same time, at least one finds the other's lease and gives up,
so no checkpoint is removed while it is read.

In stores without locks a lease expires, so a thread renews a reader's lease.

A removal deletes the manifest first. The other files are then like those of a failed save, and are removed now or, if
this process dies, by a later removal.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from terrazzo.checkpoint.manager.records import KEPT, RUN, Catalog
from terrazzo.checkpoint.native.commit import ended, remove_leftovers, sweep, temporary_of
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import LATEST, name_of_step
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Entry, Lease, Store
from terrazzo.checkpoint.stores.base import TEMPORARY
from terrazzo.errors import CheckpointManagerError, CheckpointNotFoundError

_SOONEST: Final = 0.1  # seconds between two renewals
_READER: Final = "read-"
_REMOVER: Final = "remove-"
_LEASE: Final = ".lease"


def take_to_read(catalog: Catalog, step: int) -> Lease:
    """Hold a checkpoint until the lease is released.

    Where nothing can be written, the lease is none: the checkpoint can be read, but may be removed meanwhile.
    """
    store = catalog.store_of(step)
    gone = CheckpointNotFoundError(f"{store.location} has no complete checkpoint, or it is being removed")
    if not store.exists(MANIFEST):
        raise gone
    try:
        lease: Lease = _Renewed(store, _READER)
    except (OSError, NotImplementedError) as error:
        lease = _NoLease()
        catalog.tell(
            f"{catalog.root}: what is read there is not held, so that a run that saves there may remove it meanwhile, "
            "and reading then raises an error",
            error,
        )
    if is_held(store, _REMOVER) or not store.exists(MANIFEST):
        lease.release()
        with suppress(OSError):  # it stays for a later removal
            catalog.root.store.remove_folder(name_of_step(step))
        raise gone
    return lease


@contextmanager
def removing(store: Store) -> Iterator[bool]:
    """Yields whether a checkpoint may be removed; while the context lasts no reader can begin to hold it."""
    with _Renewed(store, _REMOVER):
        yield not is_held(store)


def is_held(store: Store, kind: str = _READER) -> bool:
    """Whether there is a reader of a checkpoint (or a removal)."""
    leases = _leases(store, kind)
    return len(ended(store, leases)) < len(leases)


def remove(catalog: Catalog, step: int) -> bool:
    """Remove a checkpoint; returns False if a reader holds it."""
    store = catalog.store_of(step)
    if catalog.is_link(step):
        raise CheckpointManagerError(f"{store.location} is a link or a mount point, and nothing is removed through it")
    with removing(store) as may:
        if not may:
            return False
        store.delete([MANIFEST])
        store.sync()
        remove_leftovers(store)
    clear(catalog, step)
    return True


def clear(catalog: Catalog, step: int) -> None:
    """Remove files that ended saves, readers and removals have left, and the folder if it has no checkpoint."""
    store = catalog.store_of(step)
    remove_leftovers(store)
    left = [*_leases(store, _READER), *_leases(store, _REMOVER)]
    left += [entry for entry in store.list(".") if entry.key.endswith(TEMPORARY)]  # incomplete copies
    sweep(store, ended(store, left))
    if not store.exists(MANIFEST):
        catalog.root.store.remove_folder(name_of_step(step))


def clear_all(catalog: Catalog, spared: Collection[int]) -> None:
    """`clear` every step of a run except `spared` and links, and remove temporary files of `latest` and the like.

    A step that is being saved must be in `spared`, because its folder may still be empty.
    """
    root = catalog.root.store
    sweep(root, ended(root, temporary_of(root.list(), (LATEST[0], KEPT, RUN))))
    for step in catalog.steps():
        if step not in spared and not catalog.is_link(step):
            clear(catalog, step)


class _NoLease(Lease):
    """A lease that could not be written."""

    def release(self) -> None:
        """Do nothing."""


class _Renewed(Lease):
    """A lease that a thread renews while it is held."""

    def __init__(self, store: Store, kind: str) -> None:
        while True:
            self._key = f"{kind}{uuid.uuid4().hex[:12]}{_LEASE}"
            with suppress(FileExistsError):  # it was removed as expired: create it again
                self._lease = store.lease(self._key)
                break
        self._store = store
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="terrazzo-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._over.wait(max(self._store.lease_seconds / 4, _SOONEST)):
            try:
                self._store.renew_lease(self._key)
            except OSError as error:  # it expires only after three more failures
                LOGGER.warning("%s: the lease %s could not be renewed: %s", self._store.location, self._key, error)

    def release(self) -> None:
        self._over.set()
        self._thread.join()  # or it could write the lease again
        self._lease.release()


def _leases(store: Store, kind: str) -> list[Entry]:
    return [entry for entry in store.list(kind) if entry.key.endswith(_LEASE)]
