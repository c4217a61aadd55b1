"""Copy, remove and mend the checkpoints of a run's tiers.

After a save, on the first rank in the background, checkpoints are copied to the root, and those that are not kept are
removed (`Housekeeping`). Removals and copies run on a thread each, so the next save does not wait for them.

When a load of local files has failed (`Loading`), every host reads its files of the checkpoint and compares them with
their checksums. A damaged file of which another host has an intact copy is replaced by that; else the root's is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from terrazzo._threads import Worker, results_of
from terrazzo.checkpoint.manager.committing import Teams
from terrazzo.checkpoint.manager.hosts import HostsStore, PeerStore
from terrazzo.checkpoint.manager.job import JobLease
from terrazzo.checkpoint.manager.records import Record, held, remove
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.native.commit import Commit, has_manifest, is_held, read_manifest, remove_leftovers
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import name_as_latest, name_of_step
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.verify import copy_file, copy_intact, verify_store
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointIOError,
    ConflictError,
)


class Housekeeping:
    """The background work of a manager, which is only done while its job has the folder."""

    def __init__(self, tiers: Tiers, job: JobLease) -> None:
        self._tiers = tiers
        self._job = job
        self._janitor = Worker("terrazzo-manager")
        self._copier = Worker("terrazzo-copier")  # waited for after the janitor, which gives it work

    def after(self, step: int, saving: Future[None]) -> None:
        """Start the work that follows the save of a step, when the save is committed."""

        def follow() -> None:
            failed = saving.exception()
            self._tiers.fast.being_saved.discard(step)
            if failed is not None:
                return
            if self._tiers.local is not None:
                self._copier.submit(lambda: self._logged(self.copy, "copied"))
            self._logged(lambda: self.remove(self._tiers.fast), "removed")

        self._janitor.submit(follow)

    def finish(self, newest: bool) -> Future[None] | None:
        """Start to copy what the settings ask for, and with `newest` also the newest; the future has the error.

        None if another job, which may be dead, has the folder: call it again.
        """
        nothing: Future[None] = Future()
        nothing.set_result(None)
        if not self._due(newest):  # so a job that only reads needs no lease
            return nothing
        try:
            if not self._job.take():
                return None
        except ConflictError as error:
            LOGGER.warning("no checkpoint is copied, because that is for the other job to do: %s", error)
            return nothing
        return self._copier.submit(lambda: self.copy(newest))

    def idle(self, seconds: float) -> bool:
        """Whether no work is running; waits for at most so many seconds for each worker."""
        return self._janitor.wait(seconds) and self._copier.wait(seconds)

    def close(self) -> None:
        """Wait for running work."""
        self._janitor.wait()
        self._copier.wait()

    def _logged(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except (CheckpointError, OSError) as error:  # the next save tries again
            LOGGER.warning("%s: checkpoints could not be %s: %s", self._tiers.root.root, what, error)

    def remove(self, tier: Tier) -> None:
        """Remove checkpoints of a tier that are not kept; local ones only if they are not still to be copied."""
        needed: dict[int, str] = {}
        if tier is self._tiers.local:
            needed = {record.step: "until copied" for record in self._tiers.uncopied() if record.uncopied == 0}
        tier.remove(self._job.check, needed)

    def copy(self, newest: bool = False) -> None:
        """Copy local checkpoints to the root, the oldest first; then remove those that are not kept."""
        local = self._tiers.local
        if local is None:
            return
        due = self._due(newest)
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

    def _due(self, newest: bool) -> list[Record]:
        """The local checkpoints to be copied, the oldest first."""
        if self._tiers.local is None:
            return []
        last = [record.step for record in self._tiers.look().records[-1:]] if newest else []
        return [record for record in self._tiers.uncopied() if record.uncopied == 0 or record.step in last]

    def _copy(self, local: Tier, record: Record) -> None:
        self._job.check()
        catalog = self._tiers.root.catalog
        target = catalog.store_of(record.step)
        if record.step in catalog.look()[1]:
            raise CheckpointExistsError(f"cannot replace {target.location}, which cannot be read: move it away")
        if catalog.is_link(record.step):
            raise CheckpointExistsError(f"cannot replace {target.location}, which is a link: remove the link")
        if has_manifest(target) and is_held(target):
            raise CheckpointExistsError(f"cannot replace {target.location} while it is being read")
        with held(local.catalog, record.step):
            source = local.catalog.store_of(record.step)
            assert isinstance(source, HostsStore)
            copy_checkpoint(source, target)
        if self._tiers.root.catalog.read()[-1].step == record.step:  # `latest` must not name an older one
            name_as_latest(self._tiers.root.root, name_of_step(record.step), self._job.check)


# ------------------------------------------------------------------ from the local folders to the root


def copy_checkpoint(source: HostsStore, target: Store) -> None:
    """Copy the checkpoint of a step. A checkpoint at the target is valid until the copy is complete."""
    data, _ = source.get(MANIFEST)
    manifest = Root(data, source.location)
    files = manifest.files
    target.prepare()
    commit = Commit(target, MANIFEST)
    commit.begin()
    remove_leftovers(target, commit=commit)
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
        commit.check_committed()
    finally:
        commit.release()
    remove_leftovers(target, commit=commit)


def _send(host: LocalStore | PeerStore, target: Store, keys: list[str]) -> Sequence[str]:
    """Copy files of a host to the target; returns those that are damaged."""
    damaged = host.send_on(keys) if isinstance(host, PeerStore) else copy_intact(host, target, keys)
    for key in damaged:
        LOGGER.warning("%s/%s is not what was saved, and is not copied from there", host.location, key)
    return damaged


# ------------------------------------------------------------------ a load of files that may be damaged


_MENDS: Final = 2  # twice, because some files can be verified only when a missing index has been replaced


@dataclass(frozen=True)
class Loading:
    """The load of a checkpoint on all ranks, by `load`, which raises the same error on all. Methods are collective."""

    tiers: Tiers
    record: Record
    load: Callable[[Store], object]
    ranks: Teams

    def load_from(self, tier: Tier, reading: ExitStack, mends: int = _MENDS) -> bool:
        """Load from a tier. Returns whether its files are damaged beyond repair, so that the root's were loaded.

        While `reading` lasts, the root's copy is held then.
        """
        store, root = tier.catalog.store_of(self.record.step), self.tiers.root
        try:
            self.load(store)
            return False
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            may_be_damage = any(isinstance(each, CheckpointCorruptError | OSError | EOFError) for each in causes)
            if not mends or not isinstance(store, HostsStore) or not may_be_damage:
                raise
            try:
                replaced, lost = self._mended(store)
                in_root = bool(lost) and self._held_in_root(reading)
            except CheckpointError as failed:
                raise error from failed
            if not replaced and not in_root:
                raise
        if not in_root:
            return self.load_from(tier, reading, mends - 1)
        LOGGER.warning("%s; step %s is read from %s", "; ".join(lost), self.record.step, root.root)
        self.load(root.catalog.store_of(self.record.step))
        return True

    def discard_local(self) -> None:
        """Remove the damaged local checkpoint, so that no save shares its files and no rank reads it again."""
        local = self.tiers.fast

        def discard() -> None:
            where = local.catalog.store_of(self.record.step).location
            try:
                why = remove(local.catalog, self.record.step)  # its record may be damaged, too
            except CheckpointCorruptError as error:
                why = str(error)
            if why is not None:
                LOGGER.warning("%s is damaged, but is not removed: %s", where, why)

        self.ranks.team(f"removing the damaged step {self.record.step} from {local.root}").first(discard)

    def _mended(self, store: HostsStore) -> tuple[list[str], list[str]]:
        """What `_mend` returns on all hosts together."""

        def combine(parts: list[bytes]) -> bytes:
            found = [msgspec.msgpack.decode(part) for part in parts]
            return msgspec.msgpack.encode([sorted({each for mended in found for each in mended[n]}) for n in (0, 1)])

        team = self.ranks.team(f"looking for damage at {store.location}")
        told = team.reduce(lambda: msgspec.msgpack.encode(_mend(store) if store.leads else ((), ())), combine)
        return msgspec.msgpack.decode(told, type=tuple[list[str], list[str]])

    def _held_in_root(self, reading: ExitStack) -> bool:
        """Whether the root has a copy of this checkpoint, not of another save of the step; if so, hold it."""

        def take() -> bytes:
            catalog = self.tiers.root.catalog
            if (self.record.step, self.record.saved) not in [(each.step, each.saved) for each in catalog.read()]:
                return b""
            reading.enter_context(held(catalog, self.record.step))
            return b"held"

        doing = f"looking for step {self.record.step} in {self.tiers.root.root}"
        return bool(self.ranks.team(doing).first(take))


def _mend(store: HostsStore) -> tuple[list[str], list[str]]:
    """Replace this host's damaged files by intact ones; returns their names, and what is wrong with all others."""
    own, holders = store.own, store.holders(read_manifest(store).files)
    replaced: list[str] = []
    lost = [f"no host has {name}" for name, hosts in holders.items() if not hosts]
    here = [name for name, hosts in holders.items() if own in hosts]
    wrong = {each.file: f"{own.location}/{each.file}: {each.what}" for each in reversed(verify_store(store, only=here))}
    for name in wrong.keys() & here:
        source = next((each for each in store.others if each in holders[name] and _is_intact(store, each, name)), None)
        if source is None:
            lost.append(wrong[name])
            continue
        LOGGER.warning("%s; it is replaced by another host's copy", wrong[name])
        own.delete([name])
        replaced.append(name)
        try:
            copy_file(source, own, name)
        except (CheckpointError, OSError) as error:  # it will be read from the other host
            LOGGER.warning("%s could not be fetched from the host that has it: %s", f"{own.location}/{name}", error)
    return replaced, lost


def _is_intact(store: HostsStore, host: Store, name: str) -> bool:
    """Whether the file of another host is as it was written, by an index that is."""
    places: Any = {"own": host, "others": (*store.others, store.own)}  # its files are read, and of others what it lacks
    return not verify_store(replace(store, **places), only=[name])
