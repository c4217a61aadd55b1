"""Where scripts look for names inside DeepSpeed, and what an import of what there is not says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

# Modules by the place that DeepSpeed has for them, parents first.
HOMES: Final[Mapping[str, str]] = {
    "runtime.activation_checkpointing": "",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.dataloader": "dataloader",
    "runtime.engine": "engine",
    "runtime.pipe": "pipe",
    "runtime.pipe.engine": "pipe.engine",
    "runtime.pipe.module": "pipe.module",
    "runtime.pipe.topology": "pipe.topology",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils.logging": "utils",
    "utils.tensor_fragment": "utils",
}

ABSENT: Final[Mapping[str, str]] = {
    "init_inference": "inference is not part of it: use the model itself",
    "tp_model_init": "cut the model with terrazzo.tensor.parallel.parallelize_module",
    "moe": "experts are not divided among ranks: write the layer in PyTorch, every rank has all experts",
    "DeepSpeedHybridEngine": "there is no engine that generates",
    "DeepSpeedTransformerLayer": "PyTorch's layers are used",
    "linear": "use peft",
    "sequence": "use terrazzo.tensor.experimental.context_parallel",
    "inference": "inference is not part of it: use the model itself",
    "compression": "DeepSpeed 0.19 has removed it",
    "autotuning": "it belongs to DeepSpeed's launcher",
    "profiling": "enable flops_profiler or comms_logger in the config",
    "monitor": "enable tensorboard, wandb or csv_monitor in the config",
}
"""What DeepSpeed has and this has not, and what there is instead."""


def register(package: str) -> None:
    """Have all homes found below a package."""
    for place, module in HOMES.items():
        found = importlib.import_module(f"{package}.{module}") if module else ModuleType(f"{package}.{place}")
        if not module:
            found.__path__ = []  # it has modules inside
        sys.modules[f"{package}.{place}"] = found
        parent, _, name = place.rpartition(".")
        # Names that are there stay what they are: deepspeed.runtime.zero is deepspeed.zero, inside and out.
        if not hasattr(sys.modules[f"{package}.{parent}"], name):
            setattr(sys.modules[f"{package}.{parent}"], name, found)
    sys.meta_path.append(_Explains(package))


class _Explains:
    """Asked last of all for a module; says why there is none."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """None for all that is not one of the modules that are not there."""
        first = name.removeprefix(f"{self._package}.")
        if first != name and first in ABSENT:
            raise ModuleNotFoundError(f"{self._package} has no {first}: {ABSENT[first]}", name=name)
        return None
