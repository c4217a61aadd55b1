"""Learning-rate schedules under the names that they have in DeepSpeed's configs.

They step once per optimizer step that was not skipped; before the first, the rate is that of step 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from terrazzo._meant import meant, taken
from terrazzo.engine.config import SchedulerConfig
from terrazzo.engine.lr_cycles import LRRangeTest, OneCycle
from terrazzo.engine.lr_steps import Schedule, per_group
from terrazzo.errors import EngineConfigError


class Scheduler(Protocol):
    """What the engine needs of a scheduler; PyTorch's schedulers have it."""

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


SchedulerLike = Scheduler | Callable[[torch.optim.Optimizer], Scheduler]


class _Warmup(Schedule):
    """A schedule that starts with a warmup."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise EngineConfigError(f"config: scheduler.params.warmup_type must be log or linear, not {warmup_type!r}")
        if not isinstance(warmup_num_steps, int | float) or warmup_num_steps < 0:
            raise EngineConfigError(
                f"config: scheduler.params.warmup_num_steps must be 0 or more, not {warmup_num_steps!r}"
            )
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def warmup(self) -> float | None:
        """The progress of the warmup, from 0 to 1; None once it is over."""
        done = max(self.last_batch_iteration, 0)
        if done >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return done / self.warmup_num_steps
        return math.log(done + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, linearly or logarithmically; then constant.

    Without `warmup_max_lr` it warms up to the optimizer's own rate.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    >>> scheduler.step(); scheduler.step(); scheduler.step(); optimizer.param_groups[0]["lr"]
    0.25
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = per_group(warmup_min_lr, optimizer, "warmup_min_lr")
        self.max_lrs = per_group(warmup_max_lr, optimizer, "warmup_max_lr")
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self) -> list[float]:
        warmup = self.warmup()
        share = self.after_warmup() if warmup is None else warmup
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def after_warmup(self) -> float:
        """The position between the two rates after the warmup, from 0 to 1."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warms up, then falls linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def after_warmup(self) -> float:
        span = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / span)


class WarmupCosineLR(_Warmup):
    """Warms up from `warmup_min_ratio` of the optimizer's rate, then falls along a cosine to `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps, self.low, self.end = total_num_steps, warmup_min_ratio, cos_min_ratio
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self) -> list[float]:
        return [base * self.get_lr_ratio() for base in self.base]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's own rate at this step."""
        if self.last_batch_iteration < 0:
            return 0.0
        warmup = self.warmup()
        if warmup is not None:
            return self.low + (1.0 - self.low) * warmup
        past = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(past / max(self.total_num_steps - self.warmup_num_steps, 1), 1.0)
        return self.end + (1.0 - self.end) * (1.0 + math.cos(math.pi * progress)) / 2.0


_KNOWN: dict[str, Callable[..., Scheduler]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}


def _pytorchs(name: str) -> Callable[..., Scheduler] | None:
    """PyTorch's scheduler with this name."""
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler) else None


def make_scheduler(
    given: SchedulerLike | None, described: SchedulerConfig | None, optimizer: torch.optim.Optimizer
) -> Scheduler | None:
    """The scheduler that was passed, or made by a function or from a description; None if there is none."""
    if given is not None and described is not None:
        raise EngineConfigError("an lr scheduler was passed, and config.scheduler describes another; use one of them")
    if given is not None:
        return given(optimizer) if callable(given) else given
    if described is None:
        return None
    kind = _KNOWN.get(described.type) or _pytorchs(described.type)
    if kind is None:
        raise EngineConfigError(
            f"config: scheduler.type {described.type!r} is not one of {', '.join(_KNOWN)}, nor a scheduler of PyTorch"
            + meant(described.type, [*_KNOWN, *filter(_pytorchs, dir(torch.optim.lr_scheduler))])
        )
    try:
        return kind(optimizer, **described.params)
    except (TypeError, ValueError) as error:
        raise EngineConfigError(
            f"config: scheduler.params do not fit {described.type}: {error}{taken(kind)}"
        ) from error
