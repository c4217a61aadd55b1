"""The methods of DeepSpeed's engine that return a setting: name of the method, key in the config, default value."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from terrazzo.engine import Engine
from terrazzo.engine.translate import without_unknown

SETTINGS: Final[Mapping[str, tuple[str, Any]]] = {
    "log_level": ("log_level", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "dump_state": ("dump_state", False),
    "steps_per_print": ("steps_per_print", None),
    "optimizer_name": ("optimizer.type", None),
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "communication_data_type": ("communication_data_type", None),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "dynamic_loss_scale": ("fp16.loss_scale", 0),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_reduce_scatter": ("zero_optimization.reduce_scatter", True),
    "zero_overlap_comm": ("zero_optimization.overlap_comm", False),
    "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("zero_optimization.offload_param", None),
    "zero_sub_group_size": ("zero_optimization.sub_group_size", 1_000_000_000),
    "zero_reduce_bucket_size": ("zero_optimization.reduce_bucket_size", 500_000_000),
    "zero_allgather_bucket_size": ("zero_optimization.allgather_bucket_size", 500_000_000),
    "zero_contiguous_gradients": ("zero_optimization.contiguous_gradients", True),
    "zero_round_robin_gradients": ("zero_optimization.round_robin_gradients", False),
    "zero_max_live_parameters": ("zero_optimization.stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": ("zero_optimization.stage3_max_reuse_distance", 1_000_000_000),
    "zero_prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000),
    "zero_param_persistence_threshold": ("zero_optimization.stage3_param_persistence_threshold", 100_000),
    "zero_gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        False,
    ),
    "zero_ignore_unused_parameters": ("zero_optimization.ignore_unused_parameters", True),
    "zero_hpz_partition_size": ("zero_optimization.zero_hpz_partition_size", 1),
    "zero_quantized_weights": ("zero_optimization.zero_quantized_weights", False),
    "zero_quantized_gradients": ("zero_optimization.zero_quantized_gradients", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
}


def known_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that DeepSpeed ignores and nobody knows, about which rank 0 warns."""
    known, unknown = without_unknown(config)
    if unknown and (not dist.is_initialized() or dist.get_rank() == 0):
        shown = ", ".join(f"{name} ({why})" for name, why in unknown.items())
        warnings.warn(f"config: these keys are ignored: {shown}", stacklevel=3)
    return known


def setting(config: Mapping[str, Any], name: str) -> Any:
    """The value that a config has for the method of this name; that of "auto" is the default.

    >>> setting({"zero_optimization": {"overlap_comm": True}}, "zero_overlap_comm")
    True
    >>> setting({"zero_optimization": {"reduce_bucket_size": 5e7}}, "zero_reduce_bucket_size")
    50000000
    """
    path, default = SETTINGS[name]
    section, _, key = path.rpartition(".")
    inside: Any = config
    for step in section.split(".") if section else ():
        inside = inside.get(step) if isinstance(inside, Mapping) else None
    names = (key, key.removeprefix("stage3_"), key.replace("16bit", "fp16"))  # today's name, and older ones
    found = [inside[name] for name in names if name in inside] if isinstance(inside, Mapping) else []
    value = found[0] if found and found[0] != "auto" else None
    if type(default) is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if name == "zero_overlap_comm" and value is None:
        zero = config.get("zero_optimization")
        return isinstance(zero, Mapping) and zero.get("stage") == 3
    if name == "dynamic_loss_scale":
        return not value
    return default if value is None else value


def setting_of(engine: Engine, given: Mapping[str, Any], name: str) -> Any:
    """What DeepSpeed's method of this name returns: from the settings with which the engine runs, where it has them."""
    config, value = engine.config, setting(given, name)
    if name == "communication_data_type":
        return engine.dtype if config.communication_data_type is None else _DTYPES[config.communication_data_type]
    if name == "optimizer_name" and isinstance(value, str):
        return value.lower() if value.lower() in OPTIMIZERS else value
    if name in ("zero_offload_optimizer", "zero_offload_param"):
        return None if value is None else getattr(config.zero_optimization, name.removeprefix("zero_"))
    return value


_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS: Final = ("adagrad", "adam", "adamw", "lamb", "lion", "muon")
