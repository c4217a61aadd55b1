"""Load a step whose local files may be damaged: from other hosts' copies, or else from the copy in the root."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from terrazzo.checkpoint.manager.committing import do_together, reduce_over
from terrazzo.checkpoint.manager.hosts import HostsStore
from terrazzo.checkpoint.manager.mending import Found, may_be_damage, mend
from terrazzo.checkpoint.manager.records import Record
from terrazzo.checkpoint.manager.removing import remove, take_to_read
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.checkpoint.stores import Lease, Store
from terrazzo.errors import CheckpointError, CheckpointException

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")

_MENDS: Final = 2  # twice, because some files can be verified only when a missing index has been replaced


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
    group: Any = None
    timeout: timedelta | None = None

    def load_from(self, tier: Tier, leases: list[Lease]) -> bool:
        """Load from a tier. Returns whether its files are damaged beyond repair, so that the root's were loaded.

        The lease of the root's copy is added to `leases`.
        """
        for number in range(_MENDS + 1):
            try:
                self.load(tier.catalog.store_of(self.record.step))
                return False
            except CheckpointException as error:
                if number == _MENDS or tier is not self.tiers.local or not may_be_damage(error):
                    raise
                try:
                    found = self._mended(tier)
                    in_root = bool(found.lost) and self._held_in_root(leases)
                except CheckpointError as failed:
                    raise error from failed
                if not found.mended and not in_root:
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
            if not find_team(self.group, alone=True).is_coordinator:
                return
            if not remove(local.catalog, self.record.step):
                where = local.catalog.store_of(self.record.step).location
                LOGGER.warning("%s is damaged, but is not removed because it is being read", where)

        do_together(
            f"removing the damaged step {self.record.step} from {local.root}", discard, self.group, self.timeout
        )

    def _mended(self, tier: Tier) -> Found:
        store = tier.catalog.store_of(self.record.step)
        assert isinstance(store, HostsStore)
        doing = f"looking for damage at {store.location}"
        return mend(store, self.tiers.leads, doing, self.group, self.timeout)

    def _held_in_root(self, leases: list[Lease]) -> bool:
        """Whether the root has a copy of this checkpoint, not of another save of the step; if so, hold it."""

        def take(_: list[bytes]) -> bytes:
            catalog = self.tiers.root.catalog
            if self.record not in catalog.read():
                return b""
            leases.append(take_to_read(catalog, self.record.step))
            return b"held"

        doing = f"looking for step {self.record.step} in {self.tiers.root.root}"
        return bool(reduce_over(doing, lambda: b"", take, self.group, self.timeout))
