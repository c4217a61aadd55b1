"""Load a step whose local files may be damaged: from other hosts' copies, or else from the copy in the root.

When reading has failed, every host reads its files of the checkpoint and compares them with their checksums. A damaged
file of which another host has an intact copy is replaced by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.manager.committing import Teams
from terrazzo.checkpoint.manager.hosts import HostsStore
from terrazzo.checkpoint.manager.records import Record
from terrazzo.checkpoint.manager.removing import remove, take_to_read
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.verify import copy_file, verify_store
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Lease, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointException

_MENDS: Final = 2  # twice, because some files can be verified only when a missing index has been replaced


@dataclass(frozen=True)
class Loading:
    """The load of a checkpoint on all ranks, by `load`, which raises the same error on all. Methods are collective."""

    tiers: Tiers
    record: Record
    load: Callable[[Store], object]
    ranks: Teams

    def load_from(self, tier: Tier, leases: list[Lease], mends: int = _MENDS) -> bool:
        """Load from a tier. Returns whether its files are damaged beyond repair, so that the root's were loaded.

        The lease of the root's copy is added to `leases`.
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
                in_root = bool(lost) and self._held_in_root(leases)
            except CheckpointError as failed:
                raise error from failed
            if not replaced and not in_root:
                raise
        if not in_root:
            return self.load_from(tier, leases, mends - 1)
        LOGGER.warning("%s; step %s is read from %s", "; ".join(lost), self.record.step, root.root)
        self.load(root.catalog.store_of(self.record.step))
        return True

    def discard_local(self) -> None:
        """Remove the damaged local checkpoint, so that no save shares its files and no rank reads it again."""
        local = self.tiers.fast

        def discard() -> bytes:
            if not remove(local.catalog, self.record.step):
                where = local.catalog.store_of(self.record.step).location
                LOGGER.warning("%s is damaged, but is not removed because it is being read", where)
            return b""

        self.ranks.team(f"removing the damaged step {self.record.step} from {local.root}").first(discard)

    def _mended(self, store: HostsStore) -> tuple[list[str], list[str]]:
        """What `_mend` returns on all hosts together."""

        def combine(parts: list[bytes]) -> bytes:
            found = [msgspec.msgpack.decode(part) for part in parts]
            return msgspec.msgpack.encode([sorted({each for mended in found for each in mended[n]}) for n in (0, 1)])

        team = self.ranks.team(f"looking for damage at {store.location}")
        told = team.reduce(lambda: msgspec.msgpack.encode(_mend(store) if store.leads else ((), ())), combine)
        return msgspec.msgpack.decode(told, type=tuple[list[str], list[str]])

    def _held_in_root(self, leases: list[Lease]) -> bool:
        """Whether the root has a copy of this checkpoint, not of another save of the step; if so, hold it."""

        def take() -> bytes:
            catalog = self.tiers.root.catalog
            if self.record not in catalog.read():
                return b""
            leases.append(take_to_read(catalog, self.record.step))
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
