"""The checkpoints of a run: their records, and how one is held while it is read, and removed.

The checkpoint of step 100 is the folder `global_step100`; it is complete when it has its manifest. Its record has the
time and metrics; it is a value in the checkpoint itself, so it is committed with it.

A reader first writes its lease into the checkpoint's folder, then looks for a lease of a removal; a removal writes its
lease first, then looks for readers. If both happen at the same time, at least one finds the other's lease and gives up,
so no checkpoint is removed while it is read. In stores without locks a lease expires, so a thread renews a reader's
lease.

A removal deletes the manifest first, on condition that it is the one for which the removal was decided. The other files
are then like those of a failed save, and are removed now or, if this process dies, by a later removal.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.native.commit import (
    LEASE,
    READER,
    REMOVER,
    SAVER,
    ended,
    has_manifest,
    is_held,
    leases,
    remove_leftovers,
    sweep,
    temporary_of,
)
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.names import JOB, LATEST, name_of_step, named_by_latest, remove_marker, step_of_name
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import SMALL, Entry, Place, Store
from terrazzo.checkpoint.stores.base import GONE, TEMPORARY, Absent
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointIOError,
    CheckpointManagerError,
    CheckpointNotFoundError,
    ConflictError,
)

VALUE: Final = "checkpoint_manager"  # the name of the record among a checkpoint's values
KEPT: Final = "kept.json"  # file in the run's folder with the reasons why each step is kept, for people
_UNIT: Final = 3.0  # seconds, more than the unit of any store's dates
_OLD: Final = 3600.0  # seconds, more than a host's clock is wrong
RUN: Final = "run.id"  # file in the run's folder and in its local folders that identifies the run


class Record(msgspec.Struct, frozen=True):
    """A checkpoint of a run.

    Attributes:
        step: its step.
        saved: when the save began, in seconds since 1970; different for all checkpoints of a run.
        metrics: the metrics that were passed to `save`.
        uncopied: with a local folder, the number of checkpoints saved since the last one to be copied; 0 if this one
            is to be copied.
    """

    step: int
    saved: float
    metrics: dict[str, float] = {}
    uncopied: int = 0

    def value(self) -> str:
        """The value that is stored in the checkpoint: JSON, in which metrics may be NaN."""
        said = {"saved": self.saved, "metrics": self.metrics}
        return json.dumps({**said, "uncopied": self.uncopied} if self.uncopied else said)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics converted to floats.

    >>> checked_metrics({"loss": 1}), checked_metrics(None)
    ({'loss': 1.0}, {})
    """
    found = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise CheckpointManagerError(f"names of metrics must be text, not {name!r}: pass a dict of text to numbers")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of several elements
            raise CheckpointManagerError(f"the metric {name!r} must be a number: {error}; pass a float") from error
    return found


def checked_step(step: Any) -> int:
    """A step as an int.

    >>> checked_step(7)
    7
    """
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError) as error:
        raise CheckpointManagerError(f"the step must be an integer, not {step!r}") from error
    if step_of_name(name_of_step(number)) != number:
        raise CheckpointManagerError(f"the step must be from 0 to 10**18 - 1, not {number}")
    return number


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A checkpoint that is there and cannot be read: damaged, of a newer release, or not accessible.

    Attributes:
        error: why it cannot be read.
        modified: when its manifest was written; infinite if that cannot be read either.
    """

    error: CheckpointError
    modified: float = math.inf


@dataclass(frozen=True, slots=True)
class _Known:
    """A record, with its manifest; `is_final`: no manifest that replaces this one has the same date.

    `first` is when the manifest was first seen, by this process's clock.
    """

    entry: Entry
    first: float
    record: Record
    is_final: bool


class Catalog:
    """The complete checkpoints of numbered steps in a run's folder.

    Records are cached as long as their manifests do not change. A manifest that replaces another one may have its size
    and, within the unit of the store's dates, its date: so a new one is read again until it is older than that.
    """

    def __init__(self, root: Place) -> None:
        self.root = root
        self._known: dict[int, _Known] = {}
        self._told: set[str] = set()

    def store_of(self, step: int) -> Store:
        """The store of a step's checkpoint, which need not exist."""
        return (self.root / name_of_step(step)).store

    def steps(self) -> list[int]:
        """The steps that have a folder, complete or not."""
        steps = map(step_of_name, self.root.store.folders())
        return sorted(step for step in steps if step is not None)

    def is_link(self, step: int) -> bool:
        """Whether a step's folder is a link or a mount point, so that nothing may be written or removed there."""
        return self.root.store.is_link(name_of_step(step))

    def read(self) -> list[Record]:
        """The records of the complete checkpoints that can be read, the newest last."""
        return self.look()[0]

    def look(self) -> tuple[list[Record], dict[int, Unreadable]]:
        """The records of the complete checkpoints, the newest last; and by step, those that cannot be read."""
        records: list[Record] = []
        unreadable: dict[int, Unreadable] = {}
        for step in self.steps():
            modified = math.inf
            try:
                entry = self._entry(step)
                if entry is None:  # not complete
                    continue
                modified = entry.modified
                record = self._record(step, entry)
                if record is not None:
                    records.append(record)
                continue
            except CheckpointError as error:
                found = error
            except OSError as error:
                found = CheckpointIOError(f"{self.store_of(step).location}: {error}")
                found.__cause__ = error
            unreadable[step] = Unreadable(found, modified)
            where = self.store_of(step).location
            self.tell(f"{where} cannot be read, so it is neither used, replaced nor removed", found)
        return sorted(records, key=lambda record: (record.saved, record.step)), unreadable

    def _entry(self, step: int) -> Entry | None:
        store = self.store_of(step)
        try:
            entry = store.stat(MANIFEST)
            return entry if entry.size != len(GONE) or has_manifest(store) else None
        except FileNotFoundError:
            if not self.is_link(step):
                return None
            raise CheckpointCorruptError(f"{store.location} is a link, and it leads to no checkpoint") from None

    def _record(self, step: int, entry: Entry) -> Record | None:
        known = self._known.get(step)
        if known is not None and known.entry != entry:
            known = None
        if known is not None and known.is_final:
            return known.record
        store, now = self.store_of(step), time.monotonic()
        first = now if known is None else known.first
        try:
            record = _read_record(store, step)
        except FileNotFoundError as error:
            if not has_manifest(store):  # it was just removed
                return None
            raise CheckpointCorruptError(f"{store.location}: a file of the checkpoint is missing: {error}") from error
        is_final = now - first > _UNIT or time.time() - entry.modified > _OLD
        self._known[step] = _Known(entry, first, record, is_final)
        return record

    def tell(self, text: str, why: object) -> None:
        """Log a warning, once."""
        if text not in self._told:
            self._told.add(text)
            LOGGER.warning("%s: %s", text, why)


def _read_record(store: Store, step: int) -> Record:
    opened = NativeListing(store)
    text = opened.value(VALUE) if VALUE in opened.manifest.names else None
    if text is None:  # it was saved without a manager
        return Record(step, opened.manifest.head.created)
    try:
        record = msgspec.convert({**json.loads(text), "step": step}, Record)
        if not math.isfinite(record.saved):
            raise ValueError(f"it was saved at {record.saved}")
        return record
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointManagerError(f"{store.location}: the manager's record in it cannot be read: {error}") from error


def read_reasons(root: Place) -> dict[int, list[str]]:
    """The reasons why each step is kept, as the run's manager wrote them last."""
    try:
        data, _ = root.store.get(KEPT, SMALL)
        return msgspec.json.decode(bytes(data), type=dict[int, list[str]])
    except (FileNotFoundError, NotADirectoryError, CheckpointCorruptError, ValueError, msgspec.MsgspecError):
        return {}


# ------------------------------------------------------------------ held while they are read, and removed


_SOONEST: Final = 0.1  # seconds between two renewals


@contextmanager
def held(catalog: Catalog, step: int) -> Iterator[None]:
    """Hold a checkpoint while the context lasts.

    Where nothing can be written, it is not held: it can be read, but may be removed meanwhile.
    """
    store = catalog.store_of(step)
    gone = CheckpointNotFoundError(f"{store.location} has no complete checkpoint, or it is being removed")
    if not has_manifest(store):
        raise gone
    with ExitStack() as lease:
        try:
            lease.enter_context(_lease(store, READER))
        except (OSError, NotImplementedError) as error:
            catalog.tell(
                f"{catalog.root}: what is read there is not held, so that a run that saves there may remove it "
                "meanwhile, and reading then raises an error",
                error,
            )
        if is_held(store, REMOVER) or not has_manifest(store):
            lease.close()
            with suppress(OSError):  # it stays for a later removal
                catalog.root.store.remove_folder(name_of_step(step))
            raise gone
        yield


def remove(catalog: Catalog, step: int, judged: Record | None = None) -> str | None:
    """Remove a checkpoint; returns why not, if it is not removed.

    `judged` is the record for which that was decided: another checkpoint that is there now stays. Without it what is
    there now is removed. In either case only that manifest is removed, and none that another job commits meanwhile.
    """
    store = catalog.store_of(step)
    if catalog.is_link(step):
        raise CheckpointManagerError(f"{store.location} is a link or a mount point, and nothing is removed through it")
    with _lease(store, REMOVER):  # while it lasts, no reader can begin to hold the checkpoint
        version = store.present(MANIFEST)
        if not isinstance(version, Absent):
            if judged is not None and _read_record(store, step).saved != judged.saved:
                return "replaced"
            if is_held(store):
                return "being read"
            if is_held(store, SAVER):
                return "being saved"
            try:
                store.delete_if(MANIFEST, version)
            except ConflictError:
                return "replaced"
            store.sync()
        remove_leftovers(store)
    clear(catalog, step)
    return None


def clear(catalog: Catalog, step: int) -> None:
    """Remove files that ended saves, readers and removals have left, and the folder if it has no checkpoint."""
    store = catalog.store_of(step)
    remove_leftovers(store)
    _clear_removed(store)
    left = [*leases(store, READER), *leases(store, REMOVER)]
    left += [entry for entry in store.list(".") if entry.key.endswith(TEMPORARY)]  # incomplete copies
    sweep(store, ended(store, left))
    if not store.exists(MANIFEST):
        remove_marker(store)
        catalog.root.store.remove_folder(name_of_step(step))


def _clear_removed(store: Store) -> None:
    """Delete a manifest that a removal has replaced by `GONE`, and which has died before it could delete it."""
    with suppress(FileNotFoundError):
        if store.stat(MANIFEST).size != len(GONE):
            return
        with _lease(store, REMOVER):  # a save that begins now finds it, and does not go on
            if not is_held(store, SAVER) and not has_manifest(store):
                store.delete([MANIFEST])


def clear_all(catalog: Catalog, spared: Collection[int]) -> None:
    """`clear` every step of a run except `spared` and links, and remove temporary files of `latest` and the like.

    A step that is being saved must be in `spared`, because its folder may still be empty.
    """
    root = catalog.root.store
    sweep(root, ended(root, temporary_of(root.list(), (LATEST[0], KEPT, RUN, JOB))))
    for step in catalog.steps():
        if step not in spared and not catalog.is_link(step):
            clear(catalog, step)


@contextmanager
def _lease(store: Store, kind: str) -> Iterator[None]:
    """Hold a lease, which a thread renews, while the context lasts."""
    while True:
        key = f"{kind}{uuid.uuid4().hex[:12]}{LEASE}"
        with suppress(FileExistsError):  # it was removed as expired: create it again
            lease = store.lease(key)
            break
    over = threading.Event()

    def renew() -> None:
        while not over.wait(max(store.lease_seconds / 4, _SOONEST)):
            try:
                store.renew_lease(key)
            except OSError as error:  # it expires only after three more failures
                LOGGER.warning("%s: the lease %s could not be renewed: %s", store.location, key, error)

    with lease:
        thread = threading.Thread(target=renew, name="terrazzo-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()  # or it could write the lease again


# ------------------------------------------------------------------ for commands and the viewer


def steps_at(path: str) -> list[Record]:
    """The records of a run's folder, in order; none if it is another folder, or a checkpoint."""
    place = Place(path)
    if place.local is not None and not place.local.is_dir():
        return []
    if (place / MANIFEST).is_file():
        return []
    return sorted(Catalog(place).read(), key=lambda record: record.step)


def rows_of(path: str, records: list[Record]) -> list[dict[str, Any]]:
    """A row of a table for each record."""
    place = Place(path)
    reasons, latest = read_reasons(place), latest_of(path)
    return [
        {
            "step": record.step,
            "name": name_of_step(record.step),
            "saved": record.saved,
            "bytes": NativeListing((place / name_of_step(record.step)).store).total_bytes(),
            "metrics": record.metrics,
            "kept": reasons.get(record.step, []),
            "latest": name_of_step(record.step) == latest,
        }
        for record in records
    ]


def latest_of(path: str) -> str | None:
    """The name in `latest`, or None."""
    with suppress(CheckpointFormatError):
        return next((folder.name for folder in named_by_latest(Place(path))), None)
    return None
