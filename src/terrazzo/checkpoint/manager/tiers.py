"""The tiers of a run's checkpoints (local folders and the root), what is kept in each, and the choice of a step."""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from terrazzo.checkpoint.formats.registry import nested
from terrazzo.checkpoint.manager.committing import Teams
from terrazzo.checkpoint.manager.hosts import HostsStore, connect
from terrazzo.checkpoint.manager.records import (
    KEPT,
    RUN,
    Catalog,
    Record,
    Unreadable,
    checked_step,
    clear_all,
    remove,
)
from terrazzo.checkpoint.manager.selection import Best, Keep, reasons_to_keep
from terrazzo.checkpoint.native.names import LATEST, name_of_step, named_by_latest, step_of_name
from terrazzo.checkpoint.native.verify import copy_intact
from terrazzo.checkpoint.stores import ABSENT, SMALL, LocalStore, Place
from terrazzo.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointManagerError,
    CheckpointNotFoundError,
    ConflictError,
)

Which = int | Literal["latest", "best"]


class Tier:
    """One place of a run's checkpoints.

    Attributes:
        root: the folder.
        catalog: its checkpoints.
        being_saved: the step that is being saved, which must not be cleared.
        removed: the steps that `remove` has removed, with when they were saved.
    """

    def __init__(self, root: Place, keep: Keep | None, best: Best | None) -> None:
        self.root = root
        self.catalog = Catalog(root)
        self._keep = keep
        self._best = best
        self.being_saved: set[int] = set()
        self.removed: dict[int, float] = {}
        self._cleared = False
        self._removing = threading.Lock()

    def remove(self, check: Callable[[], None], needed: Mapping[int, str]) -> None:
        """Remove checkpoints that `Keep` does not select, that are not `needed` (for a reason) and not held.

        Nothing is removed that cannot be read, or behind a link. `check` raises if this job must not remove anything.
        """
        with self._removing:
            check()
            records, unreadable = self.catalog.look()
            for each in unreadable.values():
                if isinstance(each.error, OSError):  # it may be readable again, and what to keep depends on all
                    raise each.error
            reasons = reasons_to_keep(self._keep, records, self._best)
            for step, why in needed.items():
                reasons.setdefault(step, []).append(why)
            for record in records:
                if record.step in reasons:
                    continue
                check()
                if self.catalog.is_link(record.step):
                    reasons[record.step] = ["a link"]
                elif (reason := remove(self.catalog, record.step, record)) is not None:
                    reasons[record.step] = [reason]
                else:
                    self.removed[record.step] = record.saved
            reasons |= {step: ["cannot be read"] for step in unreadable}
            self.root.store.put(KEPT, msgspec.json.encode(reasons))
            if not self._cleared:  # once: files that killed runs have left
                self._cleared = True
                clear_all(self.catalog, self.being_saved | set(unreadable))


class Tiers:
    """All places of a run's checkpoints.

    Attributes:
        root: the run's folder or store.
        local: the local folders of its hosts, if it has any.
    """

    def __init__(self, root: Tier, local: Tier | None, hosts: HostsStore | None) -> None:
        self.root = root
        self.local = local
        self._hosts = hosts

    def close(self) -> None:
        """Close the connections to the other hosts."""
        if self._hosts is not None:
            self._hosts.close()

    @property
    def fast(self) -> Tier:
        """The tier in which steps are saved."""
        return self.local or self.root

    @property
    def all(self) -> list[Tier]:
        """All tiers, the fast one first."""
        return [self.root] if self.local is None else [self.local, self.root]

    def look(self) -> Looked:
        """The checkpoints that there are. If both tiers have a step: the newer one, or the local one."""
        found: dict[int, tuple[Record, Tier]] = {}
        unreadable: dict[int, Unreadable] = {}
        for tier in self.all:
            records, wrong = tier.catalog.look()
            unreadable = wrong | unreadable
            for record in records:
                known = found.get(record.step)
                if known is None or known[0].saved < record.saved:
                    found[record.step] = record, tier
        there = sorted(found.values(), key=lambda each: (each[0].saved, each[0].step))
        return Looked(there, unreadable)

    def why_no_latest(self, looked: Looked) -> CheckpointError | None:
        """Why it is not known which checkpoint is the newest; None if it is known, or if there is none at all."""
        named: int | None = None
        try:
            tags = [place.name for place in named_by_latest(self.root.root, LATEST[:1])]
            named = step_of_name(tags[0]) if tags else None
        except CheckpointError as error:
            if not looked.there:
                return error
        except OSError as error:
            if not looked.there:
                return CheckpointIOError(f"{self.root.root / LATEST[0]}: {error}")
        newest = looked.there[-1][0] if looked.there else None
        for step, each in sorted(looked.unreadable.items(), reverse=True):
            # Saves give steps increasing numbers, unless a run goes back; then `latest` names the newest.
            if newest is None or step == named or (step > newest.step and each.modified >= newest.saved):
                return _with_advice(each.error, step, newest)
        if named is not None and named not in looked.steps:
            return CheckpointNotFoundError(
                f"{self.root.root / LATEST[0]} names {name_of_step(named)}, which has no checkpoint that the manager "
                f"reads (no manifest); {_advice(newest)}, or correct or remove the file {LATEST[0]}"
            )
        return None

    def uncopied(self) -> list[Record]:
        """The local checkpoints of which the root has no copy, or an older one; the oldest first.

        Those whose copy has been removed from the root have been copied.
        """
        if self.local is None:
            return []
        removed = self.root.removed
        there = {record.step: record.saved for record in self.root.catalog.read()}
        missing = [each for each in self.local.catalog.read() if there.get(each.step, -math.inf) < each.saved]
        return [record for record in missing if removed.get(record.step) != record.saved]


@dataclass(frozen=True, slots=True)
class Looked:
    """The checkpoints of a run.

    Attributes:
        there: those that can be read, with their tiers, the newest last.
        unreadable: the others, by step.
    """

    there: Sequence[tuple[Record, Tier]]
    unreadable: Mapping[int, Unreadable]

    @property
    def records(self) -> list[Record]:
        """The records, the newest last."""
        return [record for record, _ in self.there]

    @property
    def steps(self) -> list[int]:
        """The steps that can be read, in order."""
        return sorted(record.step for record, _ in self.there)


def _with_advice(error: CheckpointError, step: int, newest: Record | None) -> CheckpointError:
    text = f"{name_of_step(step)} cannot be read, and it may be the newest checkpoint: {error}; {_advice(newest)}"
    found = type(error)(text)
    found.__cause__ = error
    return found


def _advice(newest: Record | None) -> str:
    if newest is None:
        return "use a release that reads it, or another folder"
    return f"to go on from an older one, call restore({newest.step}), and move away what cannot be read"


def open_tiers(
    root: Place,
    local: str | os.PathLike[str] | LocalStore | None,
    keep: Keep | None,
    keep_local: Keep | None,
    best: Best | None,
    replicas: int,
    ranks: Teams,
) -> Tiers:
    """The tiers for a manager's arguments. Collective if it has local folders."""
    for each in (keep, keep_local):
        if each is not None:
            each.reasons((), best)  # raises if it needs a metric that is not there
    top = Tier(root, keep, best)
    if local is None:
        return Tiers(top, None, None)
    own = local if isinstance(local, LocalStore) else Place(local).store
    if not isinstance(own, LocalStore):
        raise CheckpointManagerError(f"local must be a folder of this host, not {local}")

    def send_on(folder: str, keys: Sequence[str]) -> list[str]:
        return copy_intact(own.beneath(folder), (root / folder).store, keys)

    if root.local is not None and root.local.resolve() == own.path.resolve():
        raise CheckpointManagerError(f"local and root must be different folders, not both {local}")
    if not 0 <= replicas:
        raise CheckpointManagerError(f"replicas must be a number of other hosts, 0 or more, not {replicas}")
    _claim(root, own, ranks)
    hosts = connect(own, send_on, replicas, ranks)
    return Tiers(top, Tier(Place(hosts), keep_local, best), hosts)


def _claim(root: Place, own: LocalStore, ranks: Teams) -> None:
    """Raise if a local folder has checkpoints of another run, from which this one must not resume."""
    doing = f"looking at the local folder {own.location}"

    def name() -> bytes:
        root.store.prepare()
        with suppress(ConflictError):  # it exists
            root.store.put(RUN, uuid.uuid4().hex.encode(), only_if=ABSENT)
        return bytes(root.store.get(RUN, SMALL)[0])

    told = ranks.team(doing).first(name)

    def check() -> None:
        own.prepare()
        try:
            here = bytes(own.get(RUN, SMALL)[0])
        except FileNotFoundError:
            here = b"" if any(step_of_name(folder) is not None for folder in own.folders()) else told
            if here:
                own.put(RUN, told)
        if here != told:
            raise CheckpointManagerError(
                f"{own.location} has checkpoints of another run than {root}: remove that folder on each host, or use "
                "another one"
            )

    ranks.team(doing).together(check)


# ------------------------------------------------------------------ which checkpoint


def in_order_of_merit(best: Best | None, records: list[Record]) -> list[Record]:
    """The records, the best first."""
    if best is None:
        raise CheckpointManagerError("to find the best checkpoint, pass the manager best=: a metric's name or a Best")
    return best.order(records)


def choose(which: Which, looked: Looked, tiers: Tiers, best: Best | None) -> tuple[int, Tier]:
    """The step that `which` means, and its tier."""
    records, root = looked.records, tiers.root.root
    if which == "latest":
        unknown = tiers.why_no_latest(looked)
        if unknown is not None:
            raise unknown
        found = records[-1:]
    elif which == "best":
        found = in_order_of_merit(best, records)[:1]
    elif isinstance(which, str):
        raise CheckpointManagerError(f"expected a step, 'latest' or 'best', not {which!r}")
    else:
        number = checked_step(which)
        found = [record for record in records if record.step == number]
        if not found and number in looked.unreadable:
            raise looked.unreadable[number].error
    if not found:
        steps = ", ".join(map(str, looked.steps))
        raise CheckpointNotFoundError(f"{root} has no checkpoint {which}; it has {steps or 'none' + nested(root)}")
    return found[0].step, looked.there[records.index(found[0])][1]
