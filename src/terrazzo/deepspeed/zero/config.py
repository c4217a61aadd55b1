"""Names of the values in a config's `zero_optimization`."""

from __future__ import annotations

from enum import IntEnum, StrEnum


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


__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "ZeroStageEnum"]
