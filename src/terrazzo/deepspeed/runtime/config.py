"""`DeepSpeedConfig`: a config that is read and checked, with its numbers as attributes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from terrazzo.deepspeed.settings import OPTIMIZERS, known_keys
from terrazzo.engine.config import as_mapping, read_config
from terrazzo.errors import EngineConfigError as DeepSpeedConfigError
from terrazzo.layout.drawing import ShownAsCall

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS = list(OPTIMIZERS)


class DeepSpeedConfig(ShownAsCall):
    """The sections and numbers of a config, checked; the batch sizes for the ranks that there are.

    >>> config = DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    >>> config.train_micro_batch_size_per_gpu, config.zero_optimization_stage, config.gradient_clipping
    (4, 2, 1.0)

    Attributes:
        config: the config as it was passed.
        checked: the engine's own form of it, whose attributes this object has, too.
    """

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None):
        self.config = self._param_dict = as_mapping(config)
        self.checked = read_config(known_keys(self.config))[0]
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        batch = self.checked.batch(self.world_size)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.total, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = self.checked.zero_optimization
        self.monitor_config = self.checked  # which has the monitors' sections
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "checked":
            raise AttributeError(name)
        return getattr(self.checked, name)


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
