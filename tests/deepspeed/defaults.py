"""What DeepSpeed's config says where a key is missing, asked of DeepSpeed itself: prints it as JSON, by key.

Beside the keys there are `OPTIMIZER:name.argument` and `SCHEDULER:name.argument`, the arguments of its classes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import constants, lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.muon import original_muon
from pydantic import BaseModel

from terrazzo.engine.deepspeed_keys import KEYS

# Models that a config has only if it names them.
OPTIONAL = {
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
}
OPTIMIZERS = {
    "Adam": (FusedAdam, DeepSpeedCPUAdam),
    "AdamW": (FusedAdam, DeepSpeedCPUAdam),
    "Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    "Lamb": (FusedLamb,),
    "Lion": (FusedLion, DeepSpeedCPULion),
    "Muon": (original_muon.Muon,),
    "SGD": (torch.optim.SGD,),
    "torch_adam": (torch.optim.AdamW,),
}


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    value = getattr(value, "value", value)  # enumerations
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def attributes(section: Any) -> dict[str, Any]:
    """The values of a section, which is a model, a dict or another object."""
    if isinstance(section, BaseModel):
        fields = type(section).model_fields
        named = {name: getattr(section, name) for name in fields}
        return named | {info.alias: named[name] for name, info in fields.items() if info.alias}
    return dict(section) if isinstance(section, Mapping) else vars(section)


def flat(section: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in attributes(section).items():
        full = f"{path}.{name}"
        nested = full not in KEYS and any(key.startswith(f"{full}.") for key in KEYS)
        found |= flat(value, full) if nested and value is not None else {full: plain(value)}
    return found


def of_config() -> dict[str, Any]:
    config = DeepSpeedConfig({"train_batch_size": 1})
    found = {key: plain(getattr(config, key)) for key in KEYS if "." not in key and hasattr(config, key)}
    # These three are computed from each other.
    for name in ("TRAIN_BATCH_SIZE", "TRAIN_MICRO_BATCH_SIZE_PER_GPU", "GRADIENT_ACCUMULATION_STEPS"):
        found[name.lower()] = getattr(constants, f"{name}_DEFAULT")
    monitors = config.monitor_config
    sections = {
        "zero_optimization": config.zero_config,
        "fp16": config.float16_config,
        "bf16": config.bfloat16_config,
        "data_efficiency": config.data_efficiency_config,
        "flops_profiler": config.flops_profiler_config,
        "activation_checkpointing": config.activation_checkpointing_config,
        "aio": config.aio_config,
        "compile": config.compile_config,
        "tensorboard": monitors.tensorboard,
        "csv_monitor": monitors.csv_monitor,
        "wandb": monitors.wandb,
        "comms_logger": CommsLoggerConfig(),
        "tensor_parallel": config.tensor_parallel_config,
        "torch_autocast": {"enabled": config.torch_autocast_enabled, "dtype": config.torch_autocast_dtype}
        | {"lower_precision_safe_modules": config.torch_autocast_lower_precision_safe_modules},
        "data_types": {
            key: getattr(config, key)
            for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")
        },
        "optimizer": {"type": config.optimizer_name, "params": config.optimizer_params}
        | {"legacy_fusion": config.optimizer_legacy_fusion},
        "scheduler": {"type": config.scheduler_name, "params": config.scheduler_params},
        "checkpoint": {"load_universal": config.load_universal_checkpoint}
        | {"use_node_local_storage": config.use_node_local_storage},
    }
    for path, (module, name) in OPTIONAL.items():
        sections[path] = getattr(importlib.import_module(module), name)()
    for path, section in sections.items():
        found |= flat(section, path)
    for stage in (1, 2, 3):  # a default that depends on the stage is named with it
        of_stage = flat(DeepSpeedZeroConfig(stage=stage), "zero_optimization")
        found |= {
            f"{key}@{stage}": value for key, value in of_stage.items() if value != found[key] and key[-6:] != ".stage"
        }
    return found


def of_classes() -> dict[str, Any]:
    found = {}
    classes = {f"OPTIMIZER:{name}": kinds for name, kinds in OPTIMIZERS.items()}
    classes |= {f"SCHEDULER:{name}": (getattr(lr_schedules, name),) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name, kinds in classes.items():
        for kind in kinds:
            for argument, parameter in inspect.signature(kind).parameters.items():
                if parameter.default is not parameter.empty:
                    value = plain(parameter.default)
                    assert found.setdefault(f"{name}.{argument}", value) == value, (kind, argument)
    return found


def defaults() -> dict[str, Any]:
    return of_config() | of_classes()


if __name__ == "__main__":
    print(json.dumps(defaults(), indent=1))
