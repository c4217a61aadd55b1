"""When to save: small policies that combine by `|`.

A policy is asked at every step.  What it may look at decides who is asked: policies of which all ranks give the same
answer are asked everywhere, all others (clocks, and whatever a user writes) on the first rank, and all ranks hear its
answer.  So no rank saves alone.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from terrazzo.errors import CheckpointManagerError


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy is asked about.

    Attributes:
        step: which may be saved.
        last_step: that was saved or restored last; None if there is no checkpoint yet.
        seconds: since the last save began, or since the manager was made.
    """

    step: int
    last_step: int | None
    seconds: float


class SavePolicy(abc.ABC):
    """Whether to save.  One of your own has `wants`, and is asked on the first rank."""

    @property
    def same_everywhere(self) -> bool:
        """Whether all ranks, asked at the same step, give the same answer by themselves."""
        return False

    @abc.abstractmethod
    def wants(self, moment: Moment) -> bool:
        """Whether to save at this moment."""

    def __or__(self, other: SavePolicy) -> SaveAny:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SaveAny((*save_policies(self), *save_policies(other)))


def save_policies(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """The policies that one is made of."""
    if not isinstance(policy, SaveAny):
        return (policy,)
    return tuple(part for inner in policy.policies for part in save_policies(inner))


@dataclass(frozen=True, slots=True)
class SaveAny(SavePolicy):
    """If any of several policies wants it: what `|` makes."""

    policies: tuple[SavePolicy, ...]

    def wants(self, moment: Moment) -> bool:
        answers = [policy.wants(moment) for policy in self.policies]  # each is asked
        return any(answers)


@dataclass(frozen=True, slots=True)
class SaveEvery(SavePolicy):
    """Each step that is a multiple of `steps`; or once `seconds` have passed since the last save, for the first rank.

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
    """Given steps.

    >>> SaveAt({10, 1000}).wants(Moment(1000, 10, 0.0))
    True
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", frozenset(steps))

    @property
    def same_everywhere(self) -> bool:
        return True

    def wants(self, moment: Moment) -> bool:
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class SaveFirst(SavePolicy):
    """The first step of a run that has no checkpoint yet.

    >>> SaveFirst().wants(Moment(1, None, 0.0)), SaveFirst().wants(Moment(2, 1, 0.0))
    (True, False)
    """

    @property
    def same_everywhere(self) -> bool:
        return True

    def wants(self, moment: Moment) -> bool:
        return moment.last_step is None


class Agreed(Protocol):
    """Something that gives all ranks the same answer: `terrazzo.launch.StopSignal`."""

    def agreed(self) -> bool:
        """Whether the job is to end; every rank asks once in each step."""


@dataclass(frozen=True, slots=True)
class SaveOnStop(SavePolicy):
    """When the job is told to end, by a signal or a file: `SaveOnStop(StopSignal())`.

    The manager asks the signal then, once in each step: the program looks at `stop.ending`.
    """

    stop: Agreed

    @property
    def same_everywhere(self) -> bool:
        return True

    def wants(self, moment: Moment) -> bool:
        return self.stop.agreed()


def check_period(policy: object, steps: int | None, seconds: float | None) -> None:
    """Raise unless either is given, and positive."""
    given = [value for value in (steps, seconds) if value is not None]
    if len(given) != 1 or given[0] <= 0 or (steps is not None and steps != int(steps)):
        raise CheckpointManagerError(
            f"{type(policy).__name__}(steps={steps}, seconds={seconds}): pass a positive number of steps, or of seconds"
        )
