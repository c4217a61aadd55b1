"""Names of the values in a config's `zero_optimization`."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any


class ZeroStageEnum(IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class OffloadDeviceEnum(StrEnum):
    """Where something is kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What an engine keeps in memory."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def __getattr__(name: str) -> Any:
    if name not in ("DeepSpeedZeroConfig", "get_zero_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from terrazzo.deepspeed.runtime.config_utils import section_model  # needs pydantic

    globals()["DeepSpeedZeroConfig"] = model = section_model("DeepSpeedZeroConfig", "zero_optimization")
    globals()["get_zero_config"] = lambda param_dict: model(**param_dict.get("zero_optimization", {}))
    return globals()[name]


__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "ZeroStageEnum"]
