"""The tiers of a run's checkpoints (local folders and the root), what is kept in each, and the choice of a step."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

from terrazzo.checkpoint.manager.committing import do_together, reduce_over
from terrazzo.checkpoint.manager.copying import copy_file
from terrazzo.checkpoint.manager.hosts import Connected, connect
from terrazzo.checkpoint.manager.keeping import Best, KeepLast, KeepPolicy, not_copied, reasons_to_keep, settled
from terrazzo.checkpoint.manager.records import RUN, Catalog, Record, checked_step, write_reasons
from terrazzo.checkpoint.manager.removing import clear_all, remove
from terrazzo.checkpoint.native.names import step_of_name
from terrazzo.checkpoint.stores import ABSENT, LocalStore, Place
from terrazzo.errors import CheckpointManagerError, CheckpointNotFoundError, ConflictError

Which = int | Literal["latest", "best"]


class Tier:
    """One place of a run's checkpoints.

    Attributes:
        root: the folder.
        catalog: its checkpoints.
        being_saved: the step that is being saved, which must not be cleared.
    """

    def __init__(self, root: Place, keep: KeepPolicy | None, best: Best | None) -> None:
        self.root = root
        self.catalog = Catalog(root)
        self._keep = keep
        self._best = best
        self.being_saved: set[int] = set()
        self._cleared = False
        self._removing = threading.Lock()

    def remove(self, needed: Mapping[int, str] | None = None) -> None:
        """Remove checkpoints that no policy keeps, that are not `needed` (for a reason) and that no reader holds."""
        with self._removing:
            records = self.catalog.read()
            reasons = reasons_to_keep(self._keep, self._best, records)
            for step, why in (needed or {}).items():
                reasons.setdefault(step, []).append(why)
            for record in records:
                if record.step not in reasons and not remove(self.catalog, record.step):
                    reasons[record.step] = ["being read"]
            write_reasons(self.root, reasons)
            if not self._cleared:  # once: files that killed runs have left
                self._cleared = True
                clear_all(self.catalog, self.being_saved)


class Tiers:
    """All places of a run's checkpoints.

    Attributes:
        root: the run's folder or store.
        local: the local folders of its hosts, if it has any.
    """

    def __init__(self, root: Tier, local: Tier | None, hosts: Connected | None) -> None:
        self.root = root
        self.local = local
        self._hosts = hosts

    def close(self) -> None:
        """Close the connections to the other hosts."""
        if self._hosts is not None:
            self._hosts.close()

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of its host."""
        return self._hosts is not None and self._hosts.leads

    @property
    def fast(self) -> Tier:
        """The tier in which steps are saved."""
        return self.local or self.root

    @property
    def all(self) -> list[Tier]:
        """All tiers, the fast one first."""
        return [self.root] if self.local is None else [self.local, self.root]

    def read(self) -> list[tuple[Record, Tier]]:
        """The complete checkpoints, the newest last. If both tiers have a step: the newer one, or the local one."""
        found: dict[int, tuple[Record, Tier]] = {}
        for tier in self.all:
            for record in tier.catalog.read():
                known = found.get(record.step)
                if known is None or known[0].saved < record.saved:
                    found[record.step] = record, tier
        return sorted(found.values(), key=lambda each: (each[0].saved, each[0].step))

    def uncopied(self) -> list[Record]:
        """The local checkpoints of which the root has no copy, or an older one; the oldest first."""
        if self.local is None:
            return []
        return not_copied(self.local.catalog.read(), self.root.catalog.read())


def open_tiers(
    root: Place,
    local: str | os.PathLike[str] | LocalStore | None,
    keep: KeepPolicy | int | None,
    keep_local: KeepPolicy | int | None,
    best: Best | None,
    replicas: int,
    *,
    process_group: Any = None,
    timeout: timedelta | None = None,
) -> Tiers:
    """The tiers for a manager's arguments. Collective if it has local folders."""
    top = Tier(root, _settled(keep, best), best)
    below = _settled(keep_local, best)
    if local is None:
        return Tiers(top, None, None)
    own = local if isinstance(local, LocalStore) else Place(local).store
    if not isinstance(own, LocalStore):
        raise CheckpointManagerError(f"local must be a folder of this host, not {local}")

    def send_on(folder: str, key: str) -> None:
        copy_file(own.beneath(folder), (root / folder).store, key)

    if root.local is not None and root.local.resolve() == own.path.resolve():
        raise CheckpointManagerError(f"local and root must be different folders, not both {local}")
    _claim(root, own, process_group, timeout)
    hosts = connect(own, send_on, replicas, process_group, timeout)
    return Tiers(top, Tier(Place(hosts.store), below, best), hosts)


def _claim(root: Place, own: LocalStore, process_group: Any, timeout: timedelta | None) -> None:
    """Raise if a local folder has checkpoints of another run, from which this one must not resume."""
    doing = f"looking at the local folder {own.location}"

    def name(_: list[bytes]) -> bytes:
        root.store.prepare()
        with suppress(ConflictError):  # it exists
            root.store.put(RUN, uuid.uuid4().hex.encode(), only_if=ABSENT)
        return bytes(root.store.get(RUN)[0])

    told = reduce_over(doing, lambda: b"", name, process_group, timeout)

    def check() -> None:
        own.prepare()
        try:
            here = bytes(own.get(RUN)[0])
        except FileNotFoundError:
            here = b"" if any(step_of_name(folder) is not None for folder in own.folders()) else told
            if here:
                own.put(RUN, told)
        if here != told:
            raise CheckpointManagerError(
                f"{own.location} has checkpoints of another run than {root}: remove that folder on each host, or use "
                "another one"
            )

    do_together(doing, check, process_group, timeout)


def _settled(keep: KeepPolicy | int | None, best: Best | None) -> KeepPolicy | None:
    policy = KeepLast(keep) if isinstance(keep, int) else keep
    return None if policy is None else settled(policy, best)


# ------------------------------------------------------------------ which checkpoint


def in_order_of_merit(best: Best | None, records: list[Record]) -> list[Record]:
    """The records, the best first."""
    if best is None:
        raise CheckpointManagerError("to find the best checkpoint, pass the manager best=: a metric's name or a Best")
    return best.order(records)


def choose(which: Which, there: list[tuple[Record, Tier]], best: Best | None, root: str) -> tuple[int, Tier]:
    """The step that `which` means, and its tier."""
    records = [record for record, _ in there]
    if which == "latest":
        found = records[-1:]
    elif which == "best":
        found = in_order_of_merit(best, records)[:1]
    elif isinstance(which, str):
        raise CheckpointManagerError(f"expected a step, 'latest' or 'best', not {which!r}")
    else:
        number = checked_step(which)
        found = [record for record in records if record.step == number]
    if not found:
        steps = ", ".join(map(str, sorted(record.step for record in records)))
        raise CheckpointNotFoundError(f"{root} has no checkpoint {which}; it has " + (steps or "none"))
    return found[0].step, there[records.index(found[0])][1]
