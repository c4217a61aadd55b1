"""Policies for when to save. They combine with `|`.

A policy is called at every step. If its answer is the same on all ranks by itself, it is called on all ranks; else (it
looks at a clock, or a user wrote it) it is called on the first rank, which sends the answer to the others. So all ranks
save the same steps.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from terrazzo.errors import CheckpointManagerError


@dataclass(frozen=True, slots=True)
class Moment:
    """The argument of a policy.

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
        return SaveAny((*save_policies(self), *save_policies(other)))


def save_policies(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """The policies that a policy combines."""
    if not isinstance(policy, SaveAny):
        return (policy,)
    return tuple(part for inner in policy.policies for part in save_policies(inner))


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

    @property
    def same_everywhere(self) -> bool:
        return True

    def wants(self, moment: Moment) -> bool:
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class SaveFirst(SavePolicy):
    """Saves the first step of a run that has no checkpoint yet.

    >>> SaveFirst().wants(Moment(1, None, 0.0)), SaveFirst().wants(Moment(2, 1, 0.0))
    (True, False)
    """

    @property
    def same_everywhere(self) -> bool:
        return True

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

    @property
    def same_everywhere(self) -> bool:
        return True

    def wants(self, moment: Moment) -> bool:
        return self.stop.agreed()


def check_period(policy: object, steps: int | None, seconds: float | None) -> None:
    """Raise unless exactly one is given, and positive."""
    given = [value for value in (steps, seconds) if value is not None]
    if len(given) != 1 or given[0] <= 0 or (steps is not None and steps != int(steps)):
        raise CheckpointManagerError(
            f"{type(policy).__name__} needs a positive number of steps or of seconds, not {steps=}, {seconds=}"
        )
