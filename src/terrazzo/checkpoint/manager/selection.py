"""Which steps are saved (`Save`), and which checkpoints are kept (`Keep`): plain fields, as in the file of a run.

What `Keep` says depends on the records of the checkpoints alone, and the newest one is always kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from terrazzo.checkpoint.manager.records import Record, checked_step
from terrazzo.errors import CheckpointManagerError

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Agreed(Protocol):
    """A stop signal with the same answer on all ranks: `terrazzo.launch.StopSignal`."""

    def agreed(self) -> bool:
        """Whether the job should end. Every rank must call it once in each step."""


class Save(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which steps to save: those that any field selects.

    Attributes:
        steps: multiples of this number.
        seconds: a step if that much time has passed since the last save began, by the first rank's clock.
        at: these steps.
        first: the first step of a run that has no checkpoint yet.

    >>> [step for step in range(1, 31) if Save(steps=10, at=[7], first=True).selects(step, None if step == 1 else 1)]
    [1, 7, 10, 20, 30]
    """

    steps: Count | None = None
    seconds: Seconds | None = None
    at: Collection[int] = ()
    first: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, "steps")
        _check_seconds(self)
        if not isinstance(self.at, Collection):
            raise CheckpointManagerError(f"Save: `at` must be a list of steps, not {self.at!r}")
        msgspec.structs.force_setattr(self, "at", frozenset(map(checked_step, self.at)))
        if not (self.steps or self.seconds or self.at or self.first):
            raise CheckpointManagerError(
                "Save: set steps, seconds, at or first. To save each step, leave `save` of the manager out"
            )

    def selects(self, step: int, last: int | None) -> bool:
        """Whether to save the step, whatever the time is. `last` is the step saved or restored last."""
        return bool(self.steps and step % self.steps == 0) or step in self.at or (self.first and last is None)

    def is_due(self, seconds: float) -> bool:
        """Whether to save because so many seconds have passed since the last save began."""
        return self.seconds is not None and seconds >= self.seconds


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of checkpoints from best to worst, by a metric.

    A checkpoint without that metric, or for which it is NaN, is never the best.

    Attributes:
        metric: its name.
        mode: whether its smallest value ("min") or its largest ("max") is best.

    >>> Best("accuracy", "max").order([Record(1, 1.0, {"accuracy": 0.5}), Record(2, 2.0, {"accuracy": 0.7})])[0].step
    2
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise CheckpointManagerError(f"Best: `metric` must be the name of a metric, not {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise CheckpointManagerError(f"Best: `mode` must be 'min' or 'max', not {self.mode!r}")

    def order(self, records: Sequence[Record]) -> list[Record]:
        """The records that have the metric, the best first; of equal ones the newest first."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = [(sign * record.metrics.get(self.metric, math.nan), -record.saved, record) for record in records]
        found = [each for each in values if not math.isnan(each[0])]
        return [record for _, _, record in sorted(found, key=lambda each: each[:2])]


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints to keep: those that any field selects, and the newest.

    Attributes:
        last: so many of the newest.
        best: so many of the best, by the manager's `best`.
        steps: multiples of this number.
        seconds: the oldest, and each that is at least that much younger than the last one that is kept for this reason.

    >>> Keep(last=1, seconds=10).reasons([Record(1, 0.0), Record(2, 6.0), Record(3, 12.0), Record(4, 18.0)])
    {4: ['last 1', 'newest'], 1: ['every 10 seconds'], 3: ['every 10 seconds']}
    """

    last: Count | None = None
    best: Count | None = None
    steps: Count | None = None
    seconds: Seconds | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "last", "best", "steps")
        _check_seconds(self)
        if not (self.last or self.best or self.steps or self.seconds):
            raise CheckpointManagerError("Keep: set last, best, steps or seconds. To keep all, pass the manager None")

    def reasons(self, records: Sequence[Record], best: Best | None = None) -> dict[int, list[str]]:
        """The steps to keep, of all the records (the oldest first), each with the reasons."""
        found: list[tuple[Sequence[Record], str]] = []
        if self.last:
            found.append((records[-self.last :], f"last {self.last}"))
        if self.best:
            if best is None:
                raise CheckpointManagerError("Keep: `best` needs a metric: pass the manager best=")
            found.append((best.order(records)[: self.best], f"best {self.best} by {best.metric}"))
        if self.steps:
            found.append(([each for each in records if each.step % self.steps == 0], f"every {self.steps} steps"))
        if self.seconds:
            found.append((_spaced(records, self.seconds), f"every {self.seconds:g} seconds"))
        return _with_newest(found, records, best)


def reasons_to_keep(keep: Keep | None, records: Sequence[Record], best: Best | None) -> dict[int, list[str]]:
    """The steps to keep, each with the reasons. Without a `Keep` all are kept."""
    return _with_newest([(records, "all")], records, best) if keep is None else keep.reasons(records, best)


def _with_newest(
    found: Sequence[tuple[Sequence[Record], str]], records: Sequence[Record], best: Best | None
) -> dict[int, list[str]]:
    """The reasons by step; the best checkpoint and the newest are kept besides."""
    first = [] if best is None else [(best.order(records)[:1], f"best by {best.metric}")]
    reasons: dict[int, list[str]] = {}
    for kept, why in (*found, *first, (records[-1:], "newest")):
        for record in kept:
            reasons.setdefault(record.step, []).append(why)
    return reasons


def _spaced(records: Sequence[Record], seconds: float) -> list[Record]:
    kept: list[Record] = []
    for record in records:
        if not kept or record.saved >= kept[-1].saved + seconds:
            kept.append(record)
    return kept


Setting = TypeVar("Setting", Save, Keep, Best)


def setting(kind: type[Setting], name: str, given: Any) -> Setting | None:
    """A manager's argument as this class: a number or a metric's name stands for its first field."""
    if given is None or isinstance(given, kind):
        return given
    simple, words = (str, "the name of a metric") if kind is Best else (int, "an integer")
    if not isinstance(given, simple) or isinstance(given, bool):
        raise CheckpointManagerError(f"`{name}` must be {words}, a {kind.__name__} or None, not {given!r}")
    field: Any = {kind.__struct_fields__[0]: given}
    return kind(**field)


def _check_counts(given: Save | Keep, *names: str) -> None:
    for name in names:
        value = getattr(given, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CheckpointManagerError(
                f"{type(given).__name__}: `{name}` must be an integer of at least 1, not {value!r}"
            )


def _check_seconds(given: Save | Keep) -> None:
    value = given.seconds
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value > 0):
        raise CheckpointManagerError(f"{type(given).__name__}: `seconds` must be a number above 0, not {value!r}")
