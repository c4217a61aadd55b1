"""Scaling the loss, so that small gradients do not vanish in float16, by a factor that adapts to overflows."""

from __future__ import annotations

from typing import Any

from terrazzo.engine.config import EngineConfig
from terrazzo.errors import LossScaleError


class LossScale:
    """A constant factor; 1 if the precision needs none.

    >>> LossScale(128.0).value
    128.0
    """

    dynamic = False

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def update(self, overflow: bool) -> None:
        """Called after each step with whether its gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        return {"cur_scale": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: a constant comes from the config, not from the checkpoint."""


class DynamicLossScale(LossScale):
    """A factor that is halved after overflows and doubled after `window` steps without any.

    The first `hysteresis - 1` overflows do not change it; this count starts again when the factor grows, and with
    `consecutive` after each step without overflow.

    >>> scale = DynamicLossScale(4.0, window=2, hysteresis=1)
    >>> scale.update(overflow=True)
    >>> scale.value
    2.0
    """

    dynamic = True

    def __init__(
        self,
        value: float,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive: bool = False,
        minimum: float = 1.0,
        factor: float = 2.0,
    ) -> None:
        super().__init__(value)
        self.window, self.hysteresis, self.consecutive = window, hysteresis, consecutive
        self.minimum, self.factor = minimum, factor
        self.left = hysteresis  # overflows until the factor shrinks
        self.steps = 0
        self.last_overflow = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                if self.value <= self.minimum:
                    raise LossScaleError(
                        f"gradients overflow at the smallest loss scale, {self.minimum:g}: the loss itself is not "
                        "finite, or the model diverges; look at the learning rate and the data, or train in bf16"
                    )
                self.value = max(self.value / self.factor, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.steps
        else:
            if self.consecutive:
                self.left = self.hysteresis
            calm = self.steps - self.last_overflow - 1  # steps since the last overflow, this one not counted
            if calm > 0 and calm % self.window == 0:
                self.left = self.hysteresis
                self.value *= self.factor
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.value,
            "cur_hysteresis": self.left,
            "cur_iter": self.steps,
            "last_overflow_iter": self.last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; values that it lacks (after a run with a constant factor) stay as they are."""
        self.value = float(state["cur_scale"])
        self.left = int(state.get("cur_hysteresis", self.left))
        self.steps = int(state.get("cur_iter", self.steps))
        self.last_overflow = int(state.get("last_overflow_iter", self.last_overflow))


def loss_scale_of(config: EngineConfig) -> LossScale:
    """The loss scale that the config asks for."""
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScale()
    if fp16.loss_scale:
        return LossScale(fp16.loss_scale)
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
