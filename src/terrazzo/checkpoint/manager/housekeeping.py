"""What follows a save, on the first rank and in the background: copying to the root, and removing what is not kept.

Removals wait for nobody but other removals, and copies for nobody but other copies, so the next save waits for neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from terrazzo.checkpoint.manager.copying import copy_checkpoint
from terrazzo.checkpoint.manager.hosts import HostsStore
from terrazzo.checkpoint.manager.keeping import UNTIL_COPIED
from terrazzo.checkpoint.manager.records import Record
from terrazzo.checkpoint.manager.removing import is_held, take_to_read
from terrazzo.checkpoint.manager.tiers import Tier, Tiers
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import name_as_latest, name_of_step
from terrazzo.errors import CheckpointError, CheckpointExistsError

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")


class Housekeeping:
    """The work under way."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._janitor = ThreadPoolExecutor(1, "terrazzo-manager")
        self._copier = ThreadPoolExecutor(1, "terrazzo-copier")
        self._under_way: set[Future[None]] = set()

    def after(self, step: int, saving: Future[None]) -> None:
        """Begin with what follows the save of a step, once it is committed."""

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
        """Begin to copy what is to be copied, and with `newest` the newest in any case; the future has the error."""
        return self._start(self._copier, lambda: self.copy(newest))

    def idle(self, seconds: float) -> bool:
        """Whether nothing is under way, or so soon."""
        pending = set(self._under_way)
        while pending:  # a removal begins a copy
            if wait(pending, seconds).not_done:
                return False
            self._under_way -= pending
            pending = set(self._under_way)
        return True

    def close(self) -> None:
        """Wait for what is under way, and begin nothing more."""
        self._janitor.shutdown(wait=True)
        self._copier.shutdown(wait=True)

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], Any]) -> Future[None]:
        future = pool.submit(work)
        self._under_way.add(future)
        return future

    def _logged(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except (CheckpointError, OSError) as error:  # the next save tries again
            LOGGER.warning("%s: checkpoints could not be %s: %s", self._tiers.root.root, what, error)

    def remove(self, tier: Tier) -> None:
        """Remove what is not kept in a tier; of local checkpoints never what is still to be copied."""
        needed: dict[int, str] = {}
        if tier is self._tiers.local:
            needed = {record.step: UNTIL_COPIED for record in self._tiers.uncopied() if record.uncopied == 0}
        tier.remove(needed)

    def copy(self, newest: bool = False) -> None:
        """Copy local checkpoints to the root, the oldest first; then remove what need not be kept any more."""
        local = self._tiers.local
        if local is None:
            return
        last = [record.step for record, _ in self._tiers.read()[-1:]] if newest else []
        due = [record for record in self._tiers.uncopied() if record.uncopied == 0 or record.step in last]
        failed: CheckpointError | None = None
        for record in due:
            try:
                self._copy(local, record)
            except CheckpointExistsError as error:  # somebody reads what would be replaced: the others all the same
                failed = error
        if due:
            self.remove(self._tiers.root)
            self.remove(local)
        if failed is not None:
            raise failed

    def _copy(self, local: Tier, record: Record) -> None:
        target = self._tiers.root.catalog.store_of(record.step)
        if target.exists(MANIFEST) and is_held(target):
            raise CheckpointExistsError(f"{target.location} would be replaced, but somebody is reading it")
        lease = take_to_read(local.catalog, record.step)
        try:
            source = local.catalog.store_of(record.step)
            assert isinstance(source, HostsStore)
            copy_checkpoint(source, target)
        finally:
            lease.release()
        if self._tiers.root.catalog.read()[-1].step == record.step:  # not one from which the run has gone back
            name_as_latest(self._tiers.root.root, name_of_step(record.step))
