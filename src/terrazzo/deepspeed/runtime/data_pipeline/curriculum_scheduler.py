"""A difficulty that grows with the steps, for scripts that apply it to their data themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.engine.config import ScheduleConfig
from terrazzo.engine.curriculum import difficulty_schedule
from terrazzo.errors import EngineConfigError


class CurriculumScheduler:
    """The largest difficulty of the samples of a step.

    >>> scheduler = CurriculumScheduler({
    ...     "min_difficulty": 8,
    ...     "max_difficulty": 32,
    ...     "schedule_type": "fixed_linear",
    ...     "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    ... })
    >>> [scheduler.update_difficulty(step) for step in (1, 4, 7, 10)]
    [8, 16, 24, 32]

    Args:
        config: A metric's part of the config; `schedule_type` may be `custom`, see `set_custom_get_difficulty`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("schedule_type")
        self._at: Callable[[int], int] | None = None
        if kind != "custom":
            keys = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
            absent = [key for key in keys if key not in config]
            if absent:
                raise EngineConfigError(f"curriculum: the config lacks {', '.join(absent)}")
            self._at = difficulty_schedule("curriculum", ScheduleConfig(**{key: config[key] for key in keys})).at
        self.first_step = True
        self._current = int(config["min_difficulty"])

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set a function that computes the difficulty from the step."""
        self._at = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step; the first step is 1."""
        if self._at is None:
            raise EngineConfigError("curriculum: schedule_type custom needs set_custom_get_difficulty")
        return self._at(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Compute the difficulty of a step, and make it the current one."""
        self._current = self.get_difficulty(global_steps)
        return self._current

    def get_current_difficulty(self) -> int:
        """The difficulty that was computed last by `update_difficulty`."""
        return self._current
