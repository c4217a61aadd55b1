"""Numbers that grow with the steps: the allowed difficulty of samples, the number of tokens that layers keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.engine.config import ScheduleConfig, TokenScheduleConfig
from terrazzo.errors import EngineConfigError


@dataclass(frozen=True)
class Ramp:
    """From `low` to `high` in `steps` steps, by the `power`th root of the fraction of steps, in multiples of
    `multiple`.

    If `low` is not a multiple, it starts with the next one.

    >>> schedule = Ramp(low=8, high=32, steps=10, multiple=8)
    >>> [schedule.at(step) for step in (0, 4, 7, 10, 99)]
    [8, 16, 24, 32, 32]
    """

    low: int
    high: int
    steps: int
    multiple: int = 1
    power: float = 1.0

    def at(self, step: int) -> int:
        """The value in this step."""
        share = (step / self.steps) ** (1.0 / self.power)  # may exceed 1, so that `high` is reached if not a multiple
        value = int(self.low + (self.high - self.low) * share)
        lowest = -(-self.low // self.multiple) * self.multiple
        return min(max(value - value % self.multiple, lowest), self.high)


@dataclass(frozen=True)
class Staircase:
    """The first value until step `until[0]`, the second until `until[1]`, and so on; the last has no end.

    >>> [Staircase((1, 2, 5), (10, 20)).at(step) for step in (10, 11, 20, 21)]
    [1, 2, 2, 5]
    """

    values: tuple[int, ...]
    until: tuple[int, ...]

    def at(self, step: int) -> int:
        """The value in this step."""
        return self.values[sum(step > limit for limit in self.until)]


def difficulty_schedule(name: str, config: ScheduleConfig) -> Ramp | Staircase:
    """The schedule that a metric's section of the config describes."""
    where = f"curriculum_metrics.{name}"
    if config.min_difficulty > config.max_difficulty:
        raise EngineConfigError(
            f"config: {where}: min_difficulty {config.min_difficulty} is larger than "
            f"max_difficulty {config.max_difficulty}"
        )
    given = config.schedule_config
    if config.schedule_type == "fixed_discrete":
        _only(given, where, ("difficulty", "max_step"))
        values, until = tuple(given["difficulty"]), tuple(given["max_step"])
        if len(values) != len(until) + 1 or list(until) != sorted(until):
            raise EngineConfigError(
                f"config: {where}: difficulty has {len(values)} values, so max_step needs {len(values) - 1}, increasing"
            )
        return Staircase(values, until)
    needed: tuple[str, ...] = ("total_curriculum_step", "difficulty_step")
    if config.schedule_type == "fixed_root":
        needed = (*needed, "root_degree")
    _only(given, where, needed)
    _positive(given, where)
    return Ramp(
        config.min_difficulty,
        config.max_difficulty,
        given["total_curriculum_step"],
        given["difficulty_step"],
        given.get("root_degree", 1),
    )


def token_schedule(config: TokenScheduleConfig) -> Ramp:
    """The schedule that `random_ltd_schedule` describes."""
    where = "random_ltd_schedule"
    if config.min_value > config.max_value:
        raise EngineConfigError(
            f"config: {where}: min_value {config.min_value} is larger than max_value {config.max_value}"
        )
    _only(config.schedule_config, where, ("require_steps", "seq_per_step"))
    _positive(config.schedule_config, where)
    return Ramp(
        config.min_value,
        config.max_value,
        config.schedule_config["require_steps"],
        config.schedule_config["seq_per_step"],
    )


def _only(given: Mapping[str, Any], where: str, needed: Sequence[str]) -> None:
    absent = [key for key in needed if key not in given]
    strange = [key for key in given if key not in needed]
    if absent or strange:
        lacks = f" lacks {', '.join(absent)}" if absent else ""
        has = f" has unknown {', '.join(strange)}" if strange else ""
        raise EngineConfigError(f"config: {where}.schedule_config{lacks}{' and' if lacks and has else ''}{has}")


def _positive(given: Mapping[str, Any], where: str) -> None:
    for key, value in given.items():
        if not isinstance(value, int | float) or value <= 0:
            raise EngineConfigError(f"config: {where}.schedule_config.{key} must be a positive number, not {value!r}")
