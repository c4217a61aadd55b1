"""After a save, on the first rank in the background: copy checkpoints to the root, and remove those that are not kept.

Removals and copies run on a thread each, so the next save does not wait for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from terrazzo._threads import Worker, results_of
from terrazzo.checkpoint.manager.hosts import HostsStore, PeerStore
from terrazzo.checkpoint.manager.policies import UNTIL_COPIED
from terrazzo.checkpoint.manager.records import Record
from terrazzo.checkpoint.manager.removing import is_held, take_to_read
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.native.commit import Commit, remove_leftovers
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import name_as_latest, name_of_step
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.verify import copy_intact
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointIOError,
    CheckpointManagerError,
)


class Housekeeping:
    """The background work of a manager."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._janitor = Worker("terrazzo-manager")
        self._copier = Worker("terrazzo-copier")
        self._under_way: set[Future[None]] = set()
        self._failed: Exception | None = None  # the error of a policy that the run has not got yet

    def after(self, step: int, saving: Future[None]) -> None:
        """Start the work that follows the save of a step, when the save is committed."""

        def follow() -> None:
            failed = saving.exception()
            self._tiers.fast.being_saved.discard(step)
            if failed is not None:
                return
            if self._tiers.local is not None:
                self._start(self._copier, lambda: self._logged(self.copy, "copied"))
            self._logged(lambda: self.remove(self._tiers.fast), "removed")

        self._start(self._janitor, follow)

    def finish(self, newest: bool) -> Future[None]:
        """Start to copy what the settings ask for, and with `newest` also the newest; the future has the error."""
        return self._start(self._copier, lambda: self.copy(newest))

    def idle(self, seconds: float) -> bool:
        """Whether no work is running; waits for at most so many seconds."""
        pending = set(self._under_way)
        while pending:  # a removal may start a copy
            if wait(pending, seconds).not_done:
                return False
            self._under_way -= pending
            pending = set(self._under_way)
        return True

    def close(self) -> None:
        """Wait for running work."""
        self._janitor.wait()
        self._copier.wait()  # after the janitor, which gives it work

    def _start(self, worker: Worker, work: Callable[[], None]) -> Future[None]:
        future = worker.submit(work)
        self._under_way.add(future)
        return future

    def _logged(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except CheckpointManagerError as error:  # a mistake in the run's program
            self._failed = error
        except (CheckpointError, OSError) as error:  # the next save tries again
            LOGGER.warning("%s: checkpoints could not be %s: %s", self._tiers.root.root, what, error)

    def raise_failed(self) -> None:
        """Raise the error of a policy, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def remove(self, tier: Tier) -> None:
        """Remove checkpoints of a tier that are not kept; local ones only if they are not still to be copied."""
        needed: dict[int, str] = {}
        if tier is self._tiers.local:
            needed = {record.step: UNTIL_COPIED for record in self._tiers.uncopied() if record.uncopied == 0}
        tier.remove(needed)

    def copy(self, newest: bool = False) -> None:
        """Copy local checkpoints to the root, the oldest first; then remove those that are not kept."""
        local = self._tiers.local
        if local is None:
            return
        last = [record.step for record in self._tiers.look().records[-1:]] if newest else []
        due = [record for record in self._tiers.uncopied() if record.uncopied == 0 or record.step in last]
        failed: CheckpointError | None = None
        for record in due:
            try:
                self._copy(local, record)
            except CheckpointExistsError as error:  # a reader holds the one to replace: go on with the others
                failed = error
        if due:
            self.remove(self._tiers.root)
            self.remove(local)
        if failed is not None:
            raise failed

    def _copy(self, local: Tier, record: Record) -> None:
        catalog = self._tiers.root.catalog
        target = catalog.store_of(record.step)
        if record.step in catalog.look()[1]:
            raise CheckpointExistsError(f"cannot replace {target.location}, which cannot be read: move it away")
        if catalog.is_link(record.step):
            raise CheckpointExistsError(f"cannot replace {target.location}, which is a link: remove the link")
        if target.exists(MANIFEST) and is_held(target):
            raise CheckpointExistsError(f"cannot replace {target.location} while it is being read")
        with take_to_read(local.catalog, record.step):
            source = local.catalog.store_of(record.step)
            assert isinstance(source, HostsStore)
            copy_checkpoint(source, target)
        if self._tiers.root.catalog.read()[-1].step == record.step:  # `latest` must not name an older one
            name_as_latest(self._tiers.root.root, name_of_step(record.step))


# ------------------------------------------------------------------ from the local folders to the root


def copy_checkpoint(source: HostsStore, target: Store) -> None:
    """Copy the checkpoint of a step. A checkpoint at the target is valid until the copy is complete."""
    data, _ = source.get(MANIFEST)
    manifest = Root(data, source.location)
    files = manifest.files
    target.prepare()
    commit = Commit(target, MANIFEST)
    commit.begin()
    remove_leftovers(target)
    commit.hold(manifest.head.save_id)
    try:
        holders, left = source.holders(files), list(files)
        while left:
            work: dict[LocalStore | PeerStore, list[str]] = defaultdict(list)
            loads: dict[LocalStore | PeerStore, int] = defaultdict(int)
            for key in sorted(left, key=lambda key: -files[key]):
                if not holders[key]:
                    raise CheckpointCorruptError(
                        f"{source.location}/{key} is damaged on each host that has it, so this step is not copied to "
                        f"{target.location}"
                    )
                host = min(holders[key], key=loads.__getitem__)  # the host with the fewest bytes to send
                holders[key].remove(host)
                loads[host] += files[key]
                work[host].append(key)
            sends = [partial(_send, host, target, keys) for host, keys in work.items()]
            left = [key for damaged in results_of(sends, len(work), "terrazzo-copy") for key in damaged]
        there = {entry.key: entry.size for entry in target.list()}
        missing = [key for key, size in files.items() if there.get(key) != size]
        if missing:
            raise CheckpointIOError(f"{target.location}: {missing[0]} was copied, but is missing or has another size")
        commit.put(memoryview(data))
    finally:
        commit.release()
    remove_leftovers(target)


def _send(host: LocalStore | PeerStore, target: Store, keys: list[str]) -> Sequence[str]:
    """Copy files of a host to the target; returns those that are damaged."""
    damaged = host.send_on(keys) if isinstance(host, PeerStore) else copy_intact(host, target, keys)
    for key in damaged:
        LOGGER.warning("%s/%s is not what was saved, and is not copied from there", host.location, key)
    return damaged
