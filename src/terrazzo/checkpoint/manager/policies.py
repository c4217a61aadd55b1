"""Policies for when to save, and for which checkpoints to keep. They combine with `|`.

A policy for when to save is called at every step. If its answer is the same on all ranks by itself, it is called on all
ranks; else (it looks at a clock, or a user wrote it) it is called on the first rank, which sends the answer to the
others. So all ranks save the same steps.

A policy for what to keep gets the records of all checkpoints of a run, the oldest first, and returns which to keep and
why. The newest is always kept.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Protocol, TypeVar

from terrazzo.checkpoint.manager.records import Catalog, Record
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointError, CheckpointManagerError


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy is told when it is asked whether to save.

    Attributes:
        step: the step that may be saved.
        last_step: the step that was saved or restored last; None if there is no checkpoint yet.
        seconds: the time since the last save began, or since the manager was constructed.
    """

    step: int
    last_step: int | None
    seconds: float


class SavePolicy(abc.ABC):
    """Whether to save. A policy of your own overrides `wants`, which is called on the first rank."""

    @property
    def same_everywhere(self) -> bool:
        """Whether all ranks get the same answer at the same step without communication."""
        return False

    @abc.abstractmethod
    def wants(self, moment: Moment) -> bool:
        """Whether to save."""

    def __or__(self, other: SavePolicy) -> SaveAny:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SaveAny((*parts_of(self), *parts_of(other)))


@dataclass(frozen=True, slots=True)
class SaveAny(SavePolicy):
    """Saves if any of several policies does: the result of `|`."""

    policies: tuple[SavePolicy, ...]

    def wants(self, moment: Moment) -> bool:
        answers = [policy.wants(moment) for policy in self.policies]  # call each, also after a yes
        return any(answers)


@dataclass(frozen=True, slots=True)
class SaveEvery(SavePolicy):
    """Saves multiples of `steps`; or when `seconds` have passed since the last save, by the first rank's clock.

    >>> SaveEvery(100).wants(Moment(200, None, 0.0)), SaveEvery(seconds=60).wants(Moment(200, None, 59.0))
    (True, False)
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_period(self, self.steps, self.seconds)

    @property
    def same_everywhere(self) -> bool:
        return self.seconds is None

    def wants(self, moment: Moment) -> bool:
        if self.steps is not None:
            return moment.step % self.steps == 0
        return self.seconds is not None and moment.seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class SaveAt(SavePolicy):
    """Saves the given steps.

    >>> SaveAt({10, 1000}).wants(Moment(1000, 10, 0.0))
    True
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", frozenset(steps))

    same_everywhere = True

    def wants(self, moment: Moment) -> bool:
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class SaveFirst(SavePolicy):
    """Saves the first step of a run that has no checkpoint yet.

    >>> SaveFirst().wants(Moment(1, None, 0.0)), SaveFirst().wants(Moment(2, 1, 0.0))
    (True, False)
    """

    same_everywhere = True

    def wants(self, moment: Moment) -> bool:
        return moment.last_step is None


class Agreed(Protocol):
    """A stop signal with the same answer on all ranks: `terrazzo.launch.StopSignal`."""

    def agreed(self) -> bool:
        """Whether the job should end. Every rank must call it once in each step."""


@dataclass(frozen=True, slots=True)
class SaveOnStop(SavePolicy):
    """Saves when the job should end, because of a signal or a file: `SaveOnStop(StopSignal())`.

    The manager calls the stop signal once in each step, so the program only looks at `stop.ending`.
    """

    stop: Agreed

    same_everywhere = True

    def wants(self, moment: Moment) -> bool:
        return self.stop.agreed()


def check_period(policy: object, steps: int | None, seconds: float | None) -> None:
    """Raise unless exactly one is given, and positive."""
    given = [value for value in (steps, seconds) if value is not None]
    if len(given) != 1 or given[0] <= 0 or (steps is not None and steps != int(steps)):
        raise CheckpointManagerError(
            f"{type(policy).__name__} needs a positive number of steps or of seconds, not {steps=}, {seconds=}"
        )


# ------------------------------------------------------------------ which checkpoints to keep


NEWEST = "newest"
UNTIL_COPIED = "until copied"


@dataclass(frozen=True, slots=True)
class Best:
    """The order of checkpoints from best to worst: by a metric's name, or by a function of the metrics.

    A checkpoint without that metric, or for which it is NaN, is never the best.

    >>> Best("accuracy", "max").order([Record(1, 1.0, {"accuracy": 0.5}), Record(2, 2.0, {"accuracy": 0.7})])[0].step
    2
    """

    metric: str | Callable[[Mapping[str, float]], float]
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise CheckpointManagerError(f"Best: `mode` must be 'min' or 'max', not {self.mode!r}")

    def __str__(self) -> str:
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")

    def order(self, records: Sequence[Record]) -> list[Record]:
        """The records that have the metric, the best first; of equal ones the newest first."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = [(self._value(record), record) for record in records]
        found = [(sign * value, -record.saved, record) for value, record in values if not math.isnan(value)]
        return [record for _, _, record in sorted(found, key=lambda each: each[:2])]

    def _value(self, record: Record) -> float:
        if isinstance(self.metric, str):
            return record.metrics.get(self.metric, math.nan)
        return float(self.metric(record.metrics)) if record.metrics else math.nan


class KeepPolicy(abc.ABC):
    """Which checkpoints to keep. A policy of your own overrides `keeps`."""

    @abc.abstractmethod
    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        """The steps to keep, of all the records (the oldest first), each with the reason in a few words."""

    def __or__(self, other: KeepPolicy) -> KeepAny:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return KeepAny((*parts_of(self), *parts_of(other)))


Policy = TypeVar("Policy", SavePolicy, KeepPolicy)


def parts_of(policy: Policy) -> tuple[Policy, ...]:
    """The policies that a policy combines."""
    if not isinstance(policy, SaveAny | KeepAny):
        return (policy,)
    return tuple(part for inner in policy.policies for part in parts_of(inner))


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Keeps what any of several policies keeps: the result of `|`."""

    policies: tuple[KeepPolicy, ...]

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        kept: dict[int, str] = {}
        for policy in self.policies:
            kept = policy.keeps(records) | kept
        return kept


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keeps the newest `count` checkpoints.

    >>> KeepLast(1).keeps([Record(1, 1.0), Record(2, 2.0)])
    {2: 'last 1'}
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self, self.count)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return {record.step: f"last {self.count}" for record in records[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keeps the best `count` checkpoints, by a metric, or else by the manager's `best`.

    >>> KeepBest(1, "loss").keeps([Record(1, 1.0, {"loss": 2.5}), Record(2, 2.0, {"loss": 3.5})])
    {1: 'best 1 by loss'}
    """

    count: int = 1
    by: Best | str | None = None

    def __post_init__(self) -> None:
        _check_count(self, self.count)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        by = Best(self.by) if isinstance(self.by, str) else self.by
        if by is None:
            raise CheckpointManagerError("KeepBest needs a metric: pass it here, or to the manager as best=")
        return {record.step: f"best {self.count} by {by}" for record in by.order(records)[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keeps multiples of `steps`; or the oldest, and each that is `seconds` younger than the last that is kept.

    >>> KeepEvery(seconds=10).keeps([Record(1, 0.0), Record(2, 6.0), Record(3, 12.0), Record(4, 18.0)])
    {1: 'every 10 seconds', 3: 'every 10 seconds'}
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_period(self, self.steps, self.seconds)

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        if self.steps is not None:
            return {record.step: f"every {self.steps} steps" for record in records if record.step % self.steps == 0}
        assert self.seconds is not None
        kept: dict[int, str] = {}
        due = -math.inf
        for record in records:
            if record.saved >= due:
                kept[record.step] = f"every {self.seconds:g} seconds"
                due = record.saved + self.seconds
        return kept


@dataclass(frozen=True, slots=True)
class KeepWhen(KeepPolicy):
    """Keeps the checkpoints for whose `Record` a function returns True.

    >>> KeepWhen(lambda record: record.step < 2, "early").keeps([Record(1, 1.0), Record(2, 2.0)])
    {1: 'early'}
    """

    function: Callable[[Record], bool]
    why: str = "custom"

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        return {record.step: self.why for record in records if self.function(record)}


@dataclass(frozen=True, slots=True)
class KeepUntilCopied(KeepPolicy):
    """Keeps checkpoints until your own program has copied them elsewhere. The manager's `local=` does not need it.

    Args:
        to: the folder, URL or store of the copies, which have the same names.
    """

    to: str | os.PathLike[str] | Store

    def keeps(self, records: Sequence[Record]) -> dict[int, str]:
        try:
            there = Catalog(Place(self.to)).read()
        except (CheckpointError, OSError) as error:
            LOGGER.warning(
                "all checkpoints are kept, because those that are copied to %s are not known: %s", self.to, error
            )
            there = []
        return {record.step: UNTIL_COPIED for record in not_copied(records, there)}


def not_copied(records: Sequence[Record], there: Sequence[Record]) -> list[Record]:
    """The checkpoints of which another place has no copy, or an older one."""
    saved = {record.step: record.saved for record in there}
    return [record for record in records if saved.get(record.step, -math.inf) < record.saved]


def _check_count(policy: object, count: int) -> None:
    if count != int(count) or count < 1:
        raise CheckpointManagerError(f"{type(policy).__name__}: the number to keep must be 1 or more, not {count}")


def settled(keep: KeepPolicy | int | None, best: Best | None) -> KeepPolicy | None:
    """The policy of a manager's argument, with `best` filled in where a `KeepBest` has no metric."""
    if keep is None:
        return None
    parts = parts_of(KeepLast(keep) if isinstance(keep, int) else keep)
    if best is None and any(isinstance(part, KeepBest) and part.by is None for part in parts):
        raise CheckpointManagerError("KeepBest needs a metric: pass it here, or to the manager as best=")
    return KeepAny(
        tuple(replace(part, by=best) if isinstance(part, KeepBest) and part.by is None else part for part in parts)
    )


def reasons_to_keep(policy: KeepPolicy | None, best: Best | None, records: Sequence[Record]) -> dict[int, list[str]]:
    """The steps that are kept, the newest last, with all reasons."""
    parts = (KeepWhen(lambda record: True, "all"),) if policy is None else parts_of(policy)
    kept = [part.keeps(records) for part in parts]
    kept += [{record.step: f"best by {best}" for record in best.order(records)[:1]}] if best is not None else []
    kept += [{record.step: NEWEST for record in records[-1:]}]
    reasons: dict[int, list[str]] = {}
    for step, why in chain.from_iterable(each.items() for each in kept):
        reasons.setdefault(step, []).append(why)
    return reasons
