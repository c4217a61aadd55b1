"""Every key that DeepSpeed's config has, asked of DeepSpeed itself: prints them, one a line."""

from __future__ import annotations

import importlib
import inspect
import os
import re

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.autotuning import constants as autotuning  # noqa: F401
from deepspeed.runtime import config, constants

MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "timers.throughput": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
}
CONSTANTS = {
    "flops_profiler": ("deepspeed.profiling.constants", r"FLOPS_PROFILER_\w+"),
    "activation_checkpointing": ("deepspeed.runtime.activation_checkpointing.config", r"ACT_CHKPT_\w+"),
    "aio": ("deepspeed.runtime.swap_tensor.constants", r"AIO_\w+"),
    "torch_autocast": ("deepspeed.runtime.constants", r"TORCH_AUTOCAST_\w+"),
    "data_types": ("deepspeed.runtime.constants", r"GRAD_ACCUM_DTYPE|PARAM_DTYPE|BUFFER_DTYPE|KEEP_IN_FP32_MODULES"),
    "checkpoint": (
        "deepspeed.runtime.constants",
        r"CHECKPOINT_TAG_VALIDATION|LOAD_UNIVERSAL_CHECKPOINT|USE_NODE_LOCAL_STORAGE_CHECKPOINT|CHECKPOINT_PARALLEL_WRITE",
    ),
    "data_efficiency.data_sampling": (
        "deepspeed.runtime.data_pipeline.constants",
        r"DATA_SAMPLING_(?:ENABLED|NUM_\w+|PIN_MEMORY)|DYNAMIC_BATCHING|CURRICULUM_LEARNING",
    ),
    "data_efficiency": ("deepspeed.runtime.data_pipeline.constants", r"DATA_EFFICIENCY_\w+|DATA_SAMPLING|DATA_ROUTING"),
}


def keys() -> set[str]:
    found = set()
    for section, (module, name) in MODELS.items():
        for field, info in getattr(importlib.import_module(module), name).model_fields.items():
            found |= {f"{section}.{field}"} | ({f"{section}.{info.alias}"} if info.alias else set())
    for section, (module, pattern) in CONSTANTS.items():
        values = vars(importlib.import_module(module)).items()
        named = {v for n, v in values if re.fullmatch(pattern, n) and isinstance(v, str)}
        found |= {f"{section}.{value}" for value in named if re.fullmatch(r"[a-z_0-9]+", value)}
    # At the top: what the functions that read the config look up, by constants or by words.
    source = inspect.getsource(config)
    word = r"([A-Z_]+|['\"]\w+['\"])"
    read = re.findall(rf"(?:get_scalar_param\(param_dict,|param_dict\.get\(|param_dict\[)\s*{word}", source)
    read += re.findall(rf"{word} in param_dict(?![\[\w.])", source)
    for name in read:
        value = name.strip("'\"") if name[0] in "'\"" else getattr(config, name, getattr(constants, name, None))
        if isinstance(value, str):
            found.add(value)
    found |= set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    found |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    return found


if __name__ == "__main__":
    print("\n".join(sorted(keys())))
