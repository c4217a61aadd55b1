"""Two more learning-rate schedules: a range test, whose rate only grows, and one cycle up and down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from terrazzo.engine.lr_steps import Schedule, per_group
from terrazzo.errors import EngineConfigError


class LRRangeTest(Schedule):
    """Grows without end: every `lr_range_test_step_size` steps by `lr_range_test_step_rate` times the first rate.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = LRRangeTest(optimizer, lr_range_test_min_lr=0.25, lr_range_test_step_size=2)
    >>> scheduler.step(); scheduler.step(); optimizer.param_groups[0]["lr"]
    0.5
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size < 1:
            raise EngineConfigError(
                "config: scheduler.params.lr_range_test_step_size must be a positive int, not "
                f"{lr_range_test_step_size!r}"
            )
        self.low = per_group(lr_range_test_min_lr, optimizer, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [low * (1 + self.step_rate * intervals) for low in self.low]


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and down again, then decaying; Adam's first beta moves the other way.

    >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = OneCycle(optimizer, cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=2)
    >>> scheduler.step(); optimizer.param_groups[0]["lr"], round(optimizer.param_groups[0]["betas"][0], 3)
    (0.5, 0.85)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise EngineConfigError(
                "config: scheduler.params: cycle_first_step_size must be positive, and cycle_second_step_size not "
                f"negative; they are {cycle_first_step_size} and {second}"
            )
        self.up, self.down = cycle_first_step_size, second
        fewer = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, fewer)
        self.decay_steps, self.decay_rate, self.decay_momentum = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = per_group(cycle_min_lr, optimizer, "cycle_min_lr")
        self.max_lrs = per_group(cycle_max_lr, optimizer, "cycle_max_lr")
        self.momentum = cycle_momentum and "betas" in optimizer.defaults
        self.low_momentum = per_group(cycle_min_mom, optimizer, "cycle_min_mom")
        self.high_momentum = per_group(cycle_max_mom, optimizer, "cycle_max_mom")
        super().__init__(optimizer, last_batch_iteration)

    def rates(self) -> list[float]:
        if self.last_batch_iteration < self.up + self.down:
            height = self.height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.decay_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at this step; None if they do not move."""
        return self._betas() if self.momentum else None

    def _betas(self) -> list[tuple[float, float]]:
        if self.last_batch_iteration < self.up + self.down:
            height = self.height()
            pairs = zip(self.low_momentum, self.high_momentum, strict=True)
            return [(high - (high - low) * height, 0.99) for low, high in pairs]
        return [(high * self._decay(self.decay_momentum), 0.99) for high in self.high_momentum]

    def height(self) -> float:
        """The height in the cycle, from 0 to 1."""
        position = (self.last_batch_iteration + 1) % (self.up + self.down)
        rising = position <= self.up
        share = position / self.up if rising else (self.up + self.down - position) / self.down
        stairs = self.stairs[0] if rising else self.stairs[1]
        return math.floor(share * stairs) / stairs if stairs > 0 else share

    def _decay(self, rate: float) -> float:
        if not self.decay_steps:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.up - self.down + 1) / self.decay_steps

    def _apply(self) -> None:
        super()._apply()
        if self.momentum:
            # The first step has the lowest, as in DeepSpeed.
            first = self.last_batch_iteration < 0
            moved = [(low, 0.99) for low in self.low_momentum] if first else self._betas()
            for group, betas in zip(self.optimizer.param_groups, moved, strict=True):
                group["betas"] = betas
