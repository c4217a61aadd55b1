"""What is known of the checkpoints of a run: their steps, when they were saved, their metrics.

The checkpoint of step 100 is the folder `global_step100`, and it is one once its manifest is in it.  Time and metrics
are a value of the checkpoint itself, so they become valid with it, in the same atomic act.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.names import name_of_step, step_of_name
from terrazzo.checkpoint.stores import Entry, Place, Store
from terrazzo.errors import CheckpointError, CheckpointManagerError

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")

VALUE: Final = "checkpoint_manager"  # the name, among a checkpoint's values, of what its manager says of it
KEPT: Final = "kept.json"  # in the folder of a run: why each step is kept, for people
RUN: Final = "run.id"  # there and in its local folders: which run they are of


class Record(msgspec.Struct, frozen=True):
    """A checkpoint of a run.

    Attributes:
        step: its step.
        saved: when it was begun, in seconds since 1970; no two of a run have the same.
        metrics: what was said of it when it was saved.
        uncopied: of a run with a local folder, how many were saved there since the last that is to be copied; 0 for
            one that is.
    """

    step: int
    saved: float
    metrics: dict[str, float] = {}
    uncopied: int = 0

    def value(self) -> str:
        """What is stored in the checkpoint: JSON, in which metrics may be NaN."""
        said = {"saved": self.saved, "metrics": self.metrics}
        return json.dumps({**said, "uncopied": self.uncopied} if self.uncopied else said)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as numbers.

    >>> checked_metrics({"loss": 1}), checked_metrics(None)
    ({'loss': 1.0}, {})
    """
    found = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise CheckpointManagerError(f"metrics have names, and {name!r} is none: pass a dict of text to numbers")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of several elements
            raise CheckpointManagerError(f"the metric {name!r} is no number: {error}; pass a float") from error
    return found


def checked_step(step: Any) -> int:
    """A step as an int.

    >>> checked_step(7)
    7
    """
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError) as error:
        raise CheckpointManagerError(f"the step {step!r} is no integer") from error
    if step_of_name(name_of_step(number)) != number:
        raise CheckpointManagerError(f"the step {number} is negative or too large: pass one below 10**18")
    return number


class Catalog:
    """The whole checkpoints of numbered steps in the folder of a run.

    What was read of a checkpoint is kept as long as its manifest stays the same.
    """

    def __init__(self, root: Place) -> None:
        self.root = root
        self._known: dict[int, tuple[Entry, Record]] = {}

    def store_of(self, step: int) -> Store:
        """The store of a step's checkpoint, whether it is there or not."""
        return (self.root / name_of_step(step)).store

    def steps(self) -> list[int]:
        """The steps of which there is a folder, whether a checkpoint is in it or not."""
        steps = map(step_of_name, self.root.store.folders())
        return sorted(step for step in steps if step is not None)

    def read(self) -> list[Record]:
        """The whole checkpoints that there are now, the newest last."""
        records = [record for step in self.steps() if (record := self._record(step)) is not None]
        return sorted(records, key=lambda record: (record.saved, record.step))

    def _record(self, step: int) -> Record | None:
        store = self.store_of(step)
        try:
            entry = store.stat(MANIFEST)
            known = self._known.get(step)
            if known is None or known[0] != entry:
                known = self._known[step] = entry, _read_record(store, step)
        except FileNotFoundError:  # not whole, or removed in this moment
            return None
        except CheckpointError as error:
            LOGGER.warning("%s is left alone, and not used: %s", store.location, error)
            return None
        return known[1]


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
        raise CheckpointManagerError(
            f"{store.location}: what its manager said of it cannot be read: {error}"
        ) from error


def read_reasons(root: Place) -> dict[int, list[str]]:
    """Why each step is kept, as the run's manager has last said."""
    try:
        data, _ = root.store.get(KEPT)
        return msgspec.json.decode(bytes(data), type=dict[int, list[str]])
    except (FileNotFoundError, NotADirectoryError, ValueError, msgspec.MsgspecError):
        return {}


def write_reasons(root: Place, reasons: Mapping[int, list[str]]) -> None:
    """Say why each step is kept."""
    root.store.put(KEPT, msgspec.json.encode({step: list(why) for step, why in reasons.items()}))
