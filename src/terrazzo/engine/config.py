"""The configuration of a training run: typed and checked, with the structure of DeepSpeed's JSON.

Unknown keys, values of the wrong type and contradictory values raise errors that name the key. Every key of DeepSpeed
is known: `deepspeed_keys` says how each is handled.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from terrazzo._meant import meant_beside, refused
from terrazzo.engine.checked import convert
from terrazzo.engine.deepspeed_keys import KEYS
from terrazzo.engine.translate import Ignored, translate
from terrazzo.errors import EngineConfigError

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class OffloadConfig(_Section, frozen=True):
    """`offload_optimizer` and `offload_param`: what is kept in CPU memory."""

    device: Literal["none", "cpu", "nvme"] = "none"
    pin_memory: bool = True


class OffloadOptimizerConfig(OffloadConfig, frozen=True):
    """`offload_optimizer`; with `step_on` "device" only the optimizer's state is in CPU memory, except in its step.

    With `device` "nvme" the state is in files without names in the folder `nvme_path`, and in memory, during a step,
    at most `buffer_count` times `buffer_size` bytes of it, or more if that of one parameter is larger.
    """

    step_on: Literal["cpu", "device"] = "cpu"
    nvme_path: str | None = None
    buffer_count: Count = 4
    buffer_size: Count = 128 << 20


class AioConfig(_Section, frozen=True):
    """`aio`: how files of state are read and written: in blocks of so many bytes, so many at once."""

    block_size: Count = 1 << 20
    queue_depth: Count = 8  # blocks at once, for each of `intra_op_parallelism`
    intra_op_parallelism: Count = 1


class LeafConfig(_Section, frozen=True):
    """`leaf_module`: modules, by class, name or end of their name, of which each is gathered and reduced as one."""

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


class ZeroConfig(_Section, frozen=True):
    """`zero_optimization`: what is sharded over the data-parallel ranks.

    The optimizer works on shards of the parameters, so both offloads have the same effect here: with either, shards,
    reduced gradients and the optimizer's state are in CPU memory, and the optimizer steps there, unless `step_on` says
    that it steps on the device. The last two fields
    only say how DeepSpeed lays out the optimizer's partitions, for checkpoints written in its layout.
    """

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadConfig = OffloadConfig()
    wrap: tuple[str, ...] = ()  # class names of the modules to gather together; empty: the items of module lists
    leaf_module: LeafConfig = LeafConfig()
    zero_hpz_partition_size: Annotated[int, msgspec.Meta(ge=0)] = 1  # in stage 3: how many ranks gather in backward
    zero_quantized_weights: bool = False  # in stage 3: gather matrices as int8
    zero_quantized_gradients: bool = False  # in stage 3: send the gradients of matrices as int8
    mics_shard_size: Count | None = None  # how many ranks a parameter is sharded over; groups of them are replicas
    sub_group_size: Count = 1_000_000_000
    round_robin_gradients: bool = False


class Fp16Config(_Section, frozen=True):
    """`fp16`: compute in float16 and scale the loss; with `loss_scale` 0 the scale adapts to overflows."""

    enabled: bool = False
    loss_scale: Amount = 0.0
    initial_scale_power: Annotated[int, msgspec.Meta(ge=0)] = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Bf16Config(_Section, frozen=True):
    """`bf16`: compute in bfloat16; with `check_grad_overflow` steps whose gradients are not finite are skipped.

    The last two go together: parameters, their gradients and the optimizer's states are bfloat16, too, not float32.
    """

    enabled: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DataTypesConfig(_Section, frozen=True):
    """`data_types`: which buffers of 16 bits become float32; None: those that a model of Transformers names itself."""

    keep_in_fp32_modules: tuple[str, ...] | None = None


class TensorParallelConfig(_Section, frozen=True):
    """`tensor_parallel`: cut a model of Hugging Face by the plan that it carries, among neighbouring ranks."""

    autotp_size: Annotated[int, msgspec.Meta(ge=0)] = 0


class AutocastConfig(_Section, frozen=True):
    """`torch_autocast`: forward runs under `torch.autocast`."""

    enabled: bool = False
    dtype: Literal["bfloat16", "bf16", "torch.bfloat16"] = "bfloat16"


class FilesConfig(_Section, frozen=True):
    """`tensorboard` and `csv_monitor`: write learning rate, loss and loss scale to `<output_path>/<job_name>`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class WandbConfig(_Section, frozen=True):
    """`wandb`: the same for Weights & Biases."""

    enabled: bool = False
    project: str | None = "deepspeed"
    group: str | None = None
    team: str | None = None


class FlopsConfig(_Section, frozen=True):
    """`flops_profiler`: count the floating-point operations of one step's forward, by module."""

    enabled: bool = False
    profile_step: Count = 1
    module_depth: int = -1
    output_file: str | None = None


class CommsConfig(_Section, frozen=True):
    """`comms_logger`: count communicated bytes; `verbose` logs each collective."""

    enabled: bool = False
    verbose: bool = False


class OptimizerConfig(_Section, frozen=True):
    """`optimizer`: a name such as AdamW, and its arguments."""

    type: str
    params: dict[str, Any] = {}


class SchedulerConfig(_Section, frozen=True):
    """`scheduler`: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, and its arguments."""

    type: str
    params: dict[str, Any] = {}


class DataSamplingConfig(_Section, frozen=True):
    """`data_sampling`: the processes that load the samples."""

    num_workers: Annotated[int, msgspec.Meta(ge=0)] = 0
    pin_memory: bool = False


class DataEfficiencyConfig(_Section, frozen=True):
    """`data_efficiency`: how the data is loaded."""

    data_sampling: DataSamplingConfig = DataSamplingConfig()


class EngineConfig(_Section, frozen=True):
    """All settings of `initialize`'s config.

    `train_batch_size` is `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x the number of
    data-parallel ranks; any one of the three may be left out.

    >>> config = EngineConfig(train_batch_size=8, zero_optimization=ZeroConfig(stage=2))
    >>> config.batch(data_parallel=4)
    Batch(total=8, micro=2, accumulation=1)
    """

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: bool = True
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    gradient_clipping: Amount = 1.0  # 0: gradients are not clipped
    zero_optimization: ZeroConfig = ZeroConfig()
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: AutocastConfig = AutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    sequence_parallel_size: Count = 1  # ranks that share each sequence; neighbours among the data-parallel ones
    sequence_parallel_method: Literal["ulysses", "ring"] = "ulysses"
    use_data_before_expert_parallelism: bool = False  # only for checkpoints in DeepSpeed's layout
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    data_efficiency: DataEfficiencyConfig = DataEfficiencyConfig()
    dataloader_drop_last: bool = False
    tensorboard: FilesConfig = FilesConfig()
    csv_monitor: FilesConfig = FilesConfig()
    wandb: WandbConfig = WandbConfig()
    flops_profiler: FlopsConfig = FlopsConfig()
    comms_logger: CommsConfig = CommsConfig()
    aio: AioConfig = AioConfig()
    steps_per_print: Count | None = None
    seed: int = 1234

    def batch(self, data_parallel: int) -> Batch:
        """The batch sizes, with missing ones computed from those that are given."""
        return _batch(self, data_parallel)


class Batch(msgspec.Struct, frozen=True):
    """The sizes of a step: `total` samples on all ranks, `micro` per rank and forward, `accumulation` micro-batches."""

    total: int
    micro: int
    accumulation: int


def read_config(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str]) -> tuple[EngineConfig, Ignored]:
    """The checked config, and those of its keys that have no effect here.

    >>> read_config({"train_batch_size": 4, "bf16": {"enabled": True}})[0].bf16.enabled
    True
    >>> read_config({"train_batch_size": 4, "bf_16": {}})
    Traceback (most recent call last):
    terrazzo.errors.EngineConfigError: config: there is no key bf_16; did you mean bf16?
    """
    if isinstance(config, EngineConfig):
        given = msgspec.to_builtins(config)
        ignored = Ignored([], {})
    else:
        given, ignored = translate(as_mapping(config))
    try:
        # Also for an EngineConfig: msgspec checks types only when it converts, not in the constructor.
        checked = convert(given, EngineConfig, tuple(KEYS))
    except msgspec.ValidationError as error:
        raise EngineConfigError(f"config: {error}") from error
    _check(checked)
    return checked, ignored


_COMMENT = re.compile(r'(?P<text>"(?:\\.|[^"\\])*")|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EngineConfigError(f"config: the JSON has these keys twice: {', '.join(twice)}; keep one of each")
    return dict(pairs)


def as_mapping(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A config as a dict, from a mapping, JSON, or the path of a file with JSON; it may have comments.

    What is not JSON is read as HJSON if the package hjson is installed.

    >>> as_mapping('{"train_batch_size": 4 /* on all ranks */}  // the rest is the default')
    {'train_batch_size': 4}
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise EngineConfigError(f"config: a config is a dict, JSON or the path of a file, not {type(config).__name__}")
    path = os.fspath(config)
    is_json = path.lstrip().startswith("{")
    where = "" if is_json else f" in {path}"
    try:
        text = path if is_json else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror}{refused(error)}{meant_beside(path)}"
        raise EngineConfigError(f"config: {path!r} is neither JSON nor a readable file: {why}") from error
    except ValueError as error:
        raise EngineConfigError(f"config: not valid JSON{where}: {error}") from error
    try:
        loaded = json.loads(_COMMENT.sub(lambda found: found["text"] or " ", text), object_pairs_hook=_each_once)
    except EngineConfigError:
        raise
    except (ValueError, RecursionError) as error:
        loaded = _from_hjson(text, where, error)
    if not isinstance(loaded, dict):
        raise EngineConfigError(f"config: the JSON{where} must be an object, not a {type(loaded).__name__}")
    return loaded


def _from_hjson(text: str, where: str, error: Exception) -> Any:
    """What HJSON says: JSON with fewer quotes and commas; `error` is why it is not JSON."""
    try:
        import hjson
    except ImportError:
        raise EngineConfigError(f"config: not valid JSON{where}: {error}; HJSON needs the package hjson") from error
    try:
        return hjson.loads(text, object_pairs_hook=_each_once)
    except (hjson.HjsonDecodeError, RecursionError):
        raise EngineConfigError(f"config: not valid JSON{where}: {error}") from error


def _check(config: EngineConfig) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        raise EngineConfigError("config: fp16.enabled and bf16.enabled are both true; choose one precision")
    if config.bf16.bf16_master_weights_and_grads != config.bf16.bf16_optimizer_states:
        raise EngineConfigError(
            "config: bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states are not both true: the "
            "optimizer's states have the dtype of the parameters; set both, or none"
        )
    for name in ("loss_scale", "min_loss_scale"):
        if not math.isfinite(value := getattr(config.fp16, name)):
            raise EngineConfigError(f"config: fp16.{name} must be finite, not {value}")
    if config.fp16.min_loss_scale > 2.0**config.fp16.initial_scale_power:
        raise EngineConfigError(
            f"config: fp16.min_loss_scale {config.fp16.min_loss_scale:g} is larger than the initial scale, "
            f"2**fp16.initial_scale_power = {2.0**config.fp16.initial_scale_power:g}"
        )
    if config.torch_autocast.enabled and (config.fp16.enabled or config.bf16.enabled):
        raise EngineConfigError("config: torch_autocast.enabled with fp16 or bf16 enabled; choose one precision")
    zero = config.zero_optimization
    if zero.zero_hpz_partition_size > 1 and zero.stage != 3:
        raise EngineConfigError(f"config: zero_optimization.zero_hpz_partition_size needs stage 3, not {zero.stage}")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(zero, name) and zero.stage != 3:
            raise EngineConfigError(f"config: zero_optimization.{name} needs stage 3, not {zero.stage}")
    if zero.mics_shard_size is not None and zero.stage == 0:
        raise EngineConfigError("config: zero_optimization.mics_shard_size needs stage 1, 2 or 3, not 0")
    if config.gradient_allreduce_op == "sum" and zero.stage == 3:
        raise EngineConfigError("config: gradient_allreduce_op 'sum' needs zero_optimization.stage 0, 1 or 2, not 3")
    _check_offload(config.zero_optimization)
    _check_files(config.zero_optimization)


def _check_offload(zero: ZeroConfig) -> None:
    if zero.offload_optimizer.step_on == "device" and zero.offload_param.device == "cpu":
        raise EngineConfigError(
            "config: zero_optimization.offload_optimizer.step_on 'device' with offload_param: the optimizer steps "
            "where the parameters' shards are; choose one"
        )
    for name, section, stages in (
        ("offload_optimizer", zero.offload_optimizer, (1, 2, 3)),
        ("offload_param", zero.offload_param, (3,)),
    ):
        if section.device == "cpu" and zero.stage not in stages:
            raise EngineConfigError(
                f"config: zero_optimization.{name} needs zero_optimization.stage "
                f"{' or '.join(map(str, stages))}, not {zero.stage}"
            )


def _check_files(zero: ZeroConfig) -> None:
    """What is in files."""
    if zero.offload_param.device == "nvme":
        raise EngineConfigError(
            "config: zero_optimization.offload_param.device 'nvme' is not supported: a parameter's shard is read for "
            "each forward and backward, not once in a step, so it stays in memory; use 'cpu', with "
            "offload_optimizer.device 'nvme' for the optimizer's state, which has twice the size"
        )
    if zero.offload_optimizer.device != "nvme":
        return
    if not zero.offload_optimizer.nvme_path:
        raise EngineConfigError(
            "config: zero_optimization.offload_optimizer.device 'nvme' needs nvme_path: a folder on a local disk"
        )
    if zero.offload_optimizer.step_on == "device":
        raise EngineConfigError(
            "config: zero_optimization.offload_optimizer.device 'nvme' with step_on 'device': state is read from files "
            "to the CPU, where the optimizer steps; leave out step_on, or use device 'cpu'"
        )


def _batch(config: EngineConfig, data_parallel: int) -> Batch:
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if total is None and micro is None:
        raise EngineConfigError("config: needs train_batch_size or train_micro_batch_size_per_gpu")
    if total is not None:
        given = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        factors = [f"{name} {value}" for name, value in given.items() if value is not None]
        unit = (micro or 1) * (accumulation or 1) * data_parallel
        says = " x ".join([*factors, f"{data_parallel} data-parallel ranks"]) + (f" = {unit}" if factors else "")
        if len(factors) == 2 and total != unit:
            raise EngineConfigError(
                f"config: train_batch_size {total} is not {says}: leave out one of the three, which then follows"
            )
        if total % unit:
            below = total // unit * unit
            near = f"{below} or {below + unit}" if below else str(unit)
            raise EngineConfigError(
                f"config: train_batch_size {total} is not a multiple of {says}: use one, such as {near}"
            )
    if micro is None:
        assert total is not None
        accumulation = accumulation or 1
        micro = total // (data_parallel * accumulation)
    elif accumulation is None:
        accumulation = 1 if total is None else total // (data_parallel * micro)
    if total is None:
        total = micro * accumulation * data_parallel
    return Batch(total, micro, accumulation)
