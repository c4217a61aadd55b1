"""The optimizer that `initialize` returns: the engine's, with the attributes of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from terrazzo.deepspeed.offloading import offload_states, reload_states
from terrazzo.deepspeed.zero.config import OffloadDeviceEnum, OffloadStateTypeEnum
from terrazzo.engine import Engine
from terrazzo.errors import EngineError
from terrazzo.tensor import DTensor


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A view of the engine's optimizer: the same param groups and state. Call the engine's `step`, not this one's.

    Attributes:
        optimizer: the engine's optimizer.
    """

    # Learning-rate schedulers that were built with this optimizer check that it has stepped.
    _opt_called = True

    def __init__(self, engine: Engine) -> None:
        # Without the base class's __init__, which would create separate param groups.
        self._engine = engine
        self.optimizer = engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in the base class
        """The param groups of the engine's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the engine's optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the engine's optimizer."""
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self._engine.overflowed

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied."""
        return self._engine.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self.loss_scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale and its counts, under DeepSpeed's names."""
        return LossScaler(self._engine)

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled by the engine's `scale` before its own `backward`."""
        return self._engine.fp16_enabled()

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self._engine.loss_scale.dynamic

    @property
    def clip_grad(self) -> float:
        """The limit of the gradients' norm; 0 for none."""
        return self._engine.config.gradient_clipping

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """A copy of this rank's part of the parameters, one flat tensor for each param group."""
        parts = [[_flat_part(p) for p in group["params"]] for group in self.param_groups]
        return [torch.cat(group) for group in parts if group]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups = fp32_groups_flat

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The engine's backward, of a loss that is divided by the number of micro-batches already."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> NoReturn:
        """Raises: call the engine's `step`."""
        raise EngineError("this optimizer belongs to an engine: call engine.step() instead of optimizer.step()")

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """The same as the engine's `offload_states`."""
        offload_states(self._engine, include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """The same as the engine's `reload_states`."""
        reload_states(self._engine)

    def state_dict(self) -> dict[str, Any]:
        """The state of the engine's optimizer; each rank has its part."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what `state_dict` returned on this rank."""
        self.optimizer.load_state_dict(state_dict)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer's class in ZeRO stages 1, 2 and 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer's class in ZeRO stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """The optimizer's class in ZeRO stage 3."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """The optimizer's class for float16 in stage 0."""


class BF16_Optimizer(DeepSpeedOptimizer):
    """The optimizer's class for bfloat16 in stage 0."""


FP16_UnfusedOptimizer = FP16_Optimizer


def view_of(engine: Engine) -> DeepSpeedOptimizer:
    """The optimizer of an engine, of the class that scripts look for."""
    if engine.stage == 0:
        half = FP16_Optimizer if engine.fp16_enabled() else BF16_Optimizer
        return half(engine) if engine.dtype is not torch.float32 else DeepSpeedOptimizer(engine)
    return DeepSpeedZeroOptimizer_Stage3(engine) if engine.stage == 3 else DeepSpeedZeroOptimizer(engine)


def _flat_part(parameter: Tensor) -> Tensor:
    local = parameter.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).reshape(-1).float().clone()


_SCALER = {
    "cur_scale": "value",
    "loss_scale": "value",
    "dynamic": "dynamic",
    "cur_iter": "steps",
    "last_overflow_iter": "last_overflow",
    "cur_hysteresis": "left",
    "delayed_shift": "hysteresis",
    "scale_window": "window",
    "scale_factor": "factor",
    "min_scale": "minimum",
    "consecutive_hysteresis": "consecutive",
}


class LossScaler:
    """A view of an engine's loss scale; a name that a constant one does not have raises AttributeError."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__["_scale"] = engine.loss_scale

    def __getattr__(self, name: str) -> Any:
        if name not in _SCALER:
            raise AttributeError(f"the loss scaler has no {name!r}, only {', '.join(_SCALER)}")
        return getattr(self._scale, _SCALER[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SCALER:
            raise AttributeError(f"the loss scaler has no {name!r}, only {', '.join(_SCALER)}")
        setattr(self._scale, _SCALER[name], value)


class NoOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer of an engine without one: the model is sharded, but cannot be trained."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters) or [nn.Parameter(torch.empty(0, device="cpu"))], {})

    def step(self, closure: Any = None) -> Any:
        """Does nothing, so that the state of this optimizer can be saved, which is empty."""
