"""What learning-rate schedules have in common: a count of steps, and rates that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.errors import EngineConfigError


class Schedule:
    """Sets the rates of an optimizer's param groups, as a function of the steps taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def rates(self) -> list[float]:
        """The rate of each param group at this step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates in use."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """One optimizer step has been taken."""
        self.last_batch_iteration += 1
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])


def per_group(value: float | Sequence[float], optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    """A number for each param group, from one or as many."""
    count = len(optimizer.param_groups)
    if isinstance(value, Sequence):
        if len(value) != count:
            raise EngineConfigError(f"config: scheduler.params.{name} has {len(value)} values for {count} param groups")
        return [float(v) for v in value]
    return [float(value)] * count
