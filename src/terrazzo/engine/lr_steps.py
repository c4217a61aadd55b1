"""The base of the learning-rate schedules: a count of steps, and rates that depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.errors import EngineConfigError
from terrazzo.layout.drawing import ShownAsCall


class Schedule(ShownAsCall, torch.optim.lr_scheduler.LRScheduler):
    """Sets the rates of an optimizer's param groups, as a function of the steps taken.

    A subclass of PyTorch's, for isinstance checks; but it counts from -1, before the first step, as DeepSpeed's do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        # Without the base class's __init__, which takes a step at once and writes `initial_lr` into the param groups.
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    @property
    def last_epoch(self) -> int:  # type: ignore[override]  # an attribute in the base class
        """The number of steps taken, under the name of PyTorch's schedulers."""
        return self.last_batch_iteration

    def rates(self) -> list[float]:
        """The rate of each param group at this step."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        """The same as `rates`."""
        return list(self.rates())

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The rates in use."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one more optimizer step; or set the count to `last_batch_iteration`."""
        steps = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = steps
        self._apply()

    def _apply(self) -> None:
        groups, rates = self.optimizer.param_groups, self.rates()
        if len(groups) != len(rates):
            raise EngineConfigError(
                f"{type(self).__name__} was made for {len(rates)} param groups, and the optimizer has {len(groups)} "
                "now: call add_param_group before the schedule is made, or make a new schedule"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])


def per_group(value: float | Sequence[float], optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    """A number for each param group, from one number or one per group."""
    count = len(optimizer.param_groups)
    if isinstance(value, Sequence):
        if len(value) != count:
            raise EngineConfigError(f"config: scheduler.params.{name} has {len(value)} values for {count} param groups")
        return [float(v) for v in value]
    return [float(value)] * count
