"""Load a step whose local files may be damaged: from other hosts' copies, or else from the copy in the root.

When reading has failed, every host reads its files of the checkpoint and compares them with their checksums. A damaged
file of which another host has an intact copy is removed first, so that it is not read, copied or shared, and then
fetched from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from terrazzo.checkpoint.manager.committing import AllRanks
from terrazzo.checkpoint.manager.hosts import HostsStore
from terrazzo.checkpoint.manager.peers import copy_file
from terrazzo.checkpoint.manager.records import Record
from terrazzo.checkpoint.manager.removing import remove, take_to_read
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores import Lease, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointException

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")

_MENDS: Final = 2  # twice, because some files can be verified only when a missing index has been replaced


class _Damage(msgspec.Struct, array_like=True, frozen=True):
    """The files that are replaced; and by name, what is wrong with those of which no host has an intact copy."""

    replaced: list[str]
    lost: dict[str, str]


@dataclass(frozen=True)
class Loading:
    """The load of a checkpoint on all ranks. Its methods are collective.

    Attributes:
        tiers: the tiers in which it may be.
        record: its record.
        load: loads it from a store, or raises the same `CheckpointException` on all ranks.
    """

    tiers: Tiers
    record: Record
    load: Callable[[Store], object]
    ranks: AllRanks

    def load_from(self, tier: Tier, leases: list[Lease]) -> bool:
        """Load from a tier. Returns whether its files are damaged beyond repair, so that the root's were loaded.

        The lease of the root's copy is added to `leases`.
        """
        for number in range(_MENDS + 1):
            try:
                self.load(tier.catalog.store_of(self.record.step))
                return False
            except CheckpointException as error:
                if number == _MENDS or tier is not self.tiers.local or not _may_be_damage(error):
                    raise
                try:
                    found = self._mended(tier)
                    in_root = bool(found.lost) and self._held_in_root(leases)
                except CheckpointError as failed:
                    raise error from failed
                if not found.replaced and not in_root:
                    raise
            if in_root:
                root = self.tiers.root
                LOGGER.warning(
                    "%s; step %s is read from %s", "; ".join(found.lost.values()), self.record.step, root.root
                )
                self.load(root.catalog.store_of(self.record.step))
                return True
        raise AssertionError("the last attempt returns or raises")

    def discard_local(self) -> None:
        """Remove the damaged local checkpoint, so that no save shares its files and no rank reads it again."""
        local = self.tiers.local
        assert local is not None

        def discard() -> None:
            if self.ranks.is_first and not remove(local.catalog, self.record.step):
                where = local.catalog.store_of(self.record.step).location
                LOGGER.warning("%s is damaged, but is not removed because it is being read", where)

        self.ranks.team(f"removing the damaged step {self.record.step} from {local.root}").together(discard)

    def _mended(self, tier: Tier) -> _Damage:
        """Verify all files of the checkpoint, and replace damaged ones that are intact on another host."""
        store = tier.catalog.store_of(self.record.step)
        assert isinstance(store, HostsStore)
        doing, own, mine = f"looking for damage at {store.location}", store.own, {}

        def look() -> bytes:
            if not store.leads:
                return b""
            here = _look(store)
            mine.update({name: what for name, what in here.items() if what})
            return msgspec.msgpack.encode(here)

        told = self.ranks.team(doing).reduce(look, _judged)
        damage = msgspec.msgpack.decode(told, type=_Damage)
        replaced = {name: what for name, what in mine.items() if name in damage.replaced}
        if damage.replaced:
            # All are removed before the first is fetched, so that only intact files can be fetched.
            self.ranks.team(doing).together(partial(own.delete, list(replaced)))
            self.ranks.team(doing).together(partial(_fetch, store, replaced))
        return damage

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


def _may_be_damage(error: CheckpointException) -> bool:
    """Whether damaged files may be the cause of an error."""
    return any(isinstance(each, CheckpointCorruptError | OSError | EOFError) for each, _ in error.failures.values())


def _look(store: HostsStore) -> dict[str, str | None]:
    """What is wrong with each file that the checkpoint needs, on this host: nothing (""), or None if it is not here."""
    here = {entry.key for entry in store.own.list()}
    found = {name: "" if name in here else None for name in read_manifest(store).files}
    for damage in verify_store(store, only=here.intersection(found)):
        if found.get(damage.file) == "":
            found[damage.file] = f"{store.own.location}/{damage.file}: {damage.what}"
    return found


def _judged(parts: list[bytes]) -> bytes:
    looks = [msgspec.msgpack.decode(part, type=dict[str, str | None]) for part in parts if part]
    intact = {name for look in looks for name, what in look.items() if what == ""}
    damaged = {name: what for look in looks for name, what in look.items() if what}
    needed = {name for look in looks for name in look}
    lost = {name: damaged.get(name, f"no host has {name}") for name in sorted(needed - intact)}
    return msgspec.msgpack.encode(_Damage(sorted(set(damaged) & intact), lost))


def _fetch(store: HostsStore, names: Mapping[str, str]) -> None:
    own = store.own
    for name, what in names.items():
        LOGGER.warning("%s; it was replaced by another host's copy", what)
        try:
            copy_file(store.holder(name), own, name)
        except (CheckpointError, OSError) as error:  # it will be read from the other host
            LOGGER.warning("%s could not be fetched from the host that has it: %s", f"{own.location}/{name}", error)
