"""The modules in which scripts find DeepSpeed's names, and error messages for names that terrazzo does not have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final

# Our modules by their names in DeepSpeed, parents first.
SUBMODULES: Final[Mapping[str, str]] = {
    "accelerator.real_accelerator": "accelerator",
    "comm.comm": "comm",
    **{f"monitor.{name}": "monitor" for name in ("config", "csv_monitor", "monitor", "tensorboard", "wandb")},
    **{f"ops.adam.{name}": "ops.adam" for name in ("cpu_adam", "fused_adam")},
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.lamb.fused_lamb": "ops.lamb",
    **{f"ops.lion.{name}": "ops.lion" for name in ("cpu_lion", "fused_lion")},
    "runtime.activation_checkpointing": "",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.dataloader": "dataloader",
    "runtime.engine": "engine",
    "runtime.base_optimizer": "optimizer",
    "runtime.bf16_optimizer": "optimizer",
    "runtime.fp16": "",
    "runtime.fp16.fused_optimizer": "optimizer",
    "runtime.fp16.loss_scaler": "optimizer",
    "runtime.fp16.unfused_optimizer": "optimizer",
    "runtime.pipe": "pipe",
    "runtime.pipe.engine": "pipe.engine",
    "runtime.pipe.module": "pipe.module",
    "runtime.pipe.topology": "pipe.topology",
    "runtime.zero": "zero",
    "runtime.zero.config": "zero.config",
    "runtime.zero.offload_config": "zero.config",
    "runtime.zero.partition_parameters": "zero",
    "runtime.zero.stage3": "optimizer",
    "runtime.zero.stage_1_and_2": "optimizer",
    "utils.init_on_device": "utils",
    "utils.logging": "utils",
    "utils.tensor_fragment": "utils",
    "utils.z3_leaf_module": "utils.leaves",
}

# Those that `import deepspeed` has imported, so that scripts use them as its attributes.
_IMPORTED = (
    *("checkpoint.utils", "moe.utils", "ops.op_builder", "runtime.config_utils"),
    *("runtime.lr_schedules", "runtime.precision_config", "runtime.utils", "utils.groups", "utils.zero_to_fp32"),
)
_OF_PYDANTIC = ("runtime.config_utils", "runtime.precision_config")

_NVME = "set zero_optimization.offload_optimizer.device to nvme: threads read and write, not libaio"

ABSENT: Final[Mapping[str, str]] = {
    "init_inference": "inference is not supported: use the model itself",
    "tp_model_init": "set tensor_parallel.autotp_size, or use terrazzo.tensor.parallel.parallelize_module",
    "DeepSpeedHybridEngine": "an engine for generation is not supported",
    "DeepSpeedTransformerLayer": "use PyTorch's layers",
    "linear": "use peft",
    "sequence": "set sequence_parallel_size in the config, or use terrazzo.tensor.experimental.context_parallel",
    "inference": "inference is not supported: use the model itself",
    "compression": "DeepSpeed 0.19 has removed it",
    "autotuning": "it belongs to DeepSpeed's launcher",
    "profiling": "enable flops_profiler or comms_logger in the config",
    "monitor.comet": "enable tensorboard, wandb or csv_monitor in the config",
    "checkpoint": "`terrazzo convert` reads and writes DeepSpeed's checkpoints, universal ones too",
    "elasticity": "a checkpoint resumes on any number of ranks",
    "launcher.multinode_runner": "`terrazzo deepspeed` starts ranks over ssh; or use `terrazzo train` in a cluster",
    "module_inject": "parallelize the model with terrazzo.tensor.parallel.parallelize_module",
    "nebula": "DeepSpeed 0.19 has removed it",
    "nvme": _NVME,
    "ops.aio": _NVME,
    "ops.sparse_attention": "use PyTorch's scaled_dot_product_attention or flex_attention",
    "ops.transformer": "use PyTorch's layers",
    "runtime.comm": "use terrazzo.deepspeed.comm, or the functions of torch.distributed",
    "runtime.data_pipeline": "terrazzo has removed curricula and random-LTD: use a DataLoader with your own sampler",
    "runtime.compiler": "use engine.compile(), which is torch.compile",
    "runtime.fp16.onebit": "1-bit optimizers are not supported: use Adam or Lamb, and zero_quantized_gradients",
    "runtime.hybrid_engine": "an engine for generation is not supported",
    "runtime.sequence_parallel": "set sequence_parallel_size in the config: the engine cuts sequences",
    "runtime.swap_tensor": _NVME,
    "runtime.tensor_parallel": "set tensor_parallel.autotp_size in the config",
    "runtime.zero.tiling": "parallelize the layer with terrazzo.tensor.parallel, or recompute it in chunks",
    "utils.timer": "use torch.profiler",
}
"""Names that DeepSpeed has and terrazzo does not, and what to use instead."""


def register(package: str) -> None:
    """Make all of these modules importable below a package, and attributes of it."""
    for module in _IMPORTED:
        if module not in _OF_PYDANTIC or find_spec("pydantic"):  # they say so themselves, when a script asks for them
            importlib.import_module(f"{package}.{module}")
    for place, module in SUBMODULES.items():
        found = importlib.import_module(f"{package}.{module}") if module else ModuleType(f"{package}.{place}")
        if not module:
            found.__path__ = []  # mark it as a package
        sys.modules[f"{package}.{place}"] = found
        parent, _, name = place.rpartition(".")
        # Existing attributes are not replaced: deepspeed.runtime.zero and deepspeed.zero are the same module.
        if not hasattr(sys.modules[f"{package}.{parent}"], name):
            setattr(sys.modules[f"{package}.{parent}"], name, found)
    sys.meta_path.append(_Explains(package))


class _Explains:
    """A finder that is asked after all others; it raises an error that says why there is no such module."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """None for modules that are not below the package.

        The errors have no `name`: Python would replace one of `from package import name` by an error without advice.
        """
        place = name.removeprefix(f"{self._package}.")
        if place == name:
            return None
        for known, why in ABSENT.items():
            if place == known or place.startswith(f"{known}."):
                raise ModuleNotFoundError(f"{self._package} has no {place}: {why}")
        raise ModuleNotFoundError(f"No module named {name!r}: docs/deepspeed.md lists what there is")
