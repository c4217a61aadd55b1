"""Moving what an engine keeps on its accelerator to the CPU for a while, such as when other programs use the device."""

from __future__ import annotations

import warnings
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from terrazzo.deepspeed.zero.config import OffloadDeviceEnum, OffloadStateTypeEnum
from terrazzo.engine import Engine
from terrazzo.errors import EngineError

_TYPES = OffloadStateTypeEnum


@dataclass
class _Away:
    """What `offload_states` has moved, and has to be moved back."""

    states: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # a parameter's, and a key
    grads: list[tuple[Any, Tensor]] = field(default_factory=list)  # a parameter, and its gradient


_away: WeakKeyDictionary[Engine, _Away] = WeakKeyDictionary()


def check_reloaded(engine: Engine) -> None:
    """Raise if something has been moved that the optimizer needs."""
    if engine in _away:
        raise EngineError("offload_states() has moved what the optimizer needs to the CPU: call reload_states() first")


def offload_states(
    engine: Engine, include: Container[OffloadStateTypeEnum] | None, device: OffloadDeviceEnum | str
) -> None:
    """Move these states, or all, to the CPU."""
    if device == OffloadDeviceEnum.none:
        return
    if device != OffloadDeviceEnum.cpu:
        raise EngineError(f"offload_states moves states to the CPU, not to {device!r}")
    if engine.pipeline is not None:
        raise EngineError("offload_states is not supported in a pipeline")
    away = _away.setdefault(engine, _Away())

    def wanted(kind: OffloadStateTypeEnum) -> bool:
        return include is None or kind in include

    if wanted(_TYPES.optim_states):
        for state in engine.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[key] = value.to("cpu")
                    away.states.append((state, key))
    if wanted(_TYPES.lp_grads):
        engine.reshard()
        for parameter in engine.module.parameters():
            if parameter.grad is not None and parameter.device.type != "cpu":
                away.grads.append((parameter, parameter.grad.to("cpu")))
                parameter.grad = None
    if wanted(_TYPES.hp_params) or wanted(_TYPES.lp_params):
        engine.reshard()  # whole parameters in the precision of forward are freed
    if wanted(_TYPES.hp_params) and any(p.device.type != "cpu" for p in engine.module.parameters()):
        warnings.warn("offload_states: the parameters' float32 shards stay on the accelerator", stacklevel=3)


def reload_states(engine: Engine) -> None:
    """Move back what `offload_states` has moved."""
    away = _away.pop(engine, None)
    if away is None:
        return
    for parameter, grad in away.grads:
        parameter.grad = grad.to(parameter.device)
    for state, key in away.states:
        state[key] = state[key].to(engine.device)
    engine.show()
