"""Every key of DeepSpeed's config, and how terrazzo handles it.

    done       it means the same as in DeepSpeed
    mapped     another key of the engine does the same; `terrazzo.engine.translate` converts it
    harmless   it changes neither numbers nor memory here; it is ignored, with one log message
    warned     in DeepSpeed it changes memory, or what is checked; here it has no effect: a warning with the reason,
               unless its value asks for nothing
    refused    what it asks for is not supported: an error with the reason, unless its value asks for nothing

`docs/deepspeed.md` shows this table; a test asks DeepSpeed itself for its keys, and checks that all are here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

Fate = Literal["done", "mapped", "harmless", "warned", "refused"]


@dataclass(frozen=True, slots=True)
class Key:
    """How a key is handled, why, and for one that is warned about or refused the values that ask for nothing.

    One that is ignored may be one of a few `words`, in capitals or not; others are an error, as in DeepSpeed.
    """

    fate: Fate
    why: str
    nothing: tuple[Any, ...] = (None, False, {})
    words: tuple[str, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether a value asks for the feature that is not there."""
        if isinstance(value, dict) and "enabled" in value:
            return value["enabled"] is not False
        return all(value is not other and value != other for other in self.nothing)


def _done(why: str = "") -> Key:
    return Key("done", why)


def _mapped(why: str) -> Key:
    return Key("mapped", why)


def _harmless(why: str, *words: str) -> Key:
    return Key("harmless", why, words=words)


def _warned(why: str, *nothing: Any) -> Key:
    return Key("warned", why, (None, "auto", {}, *nothing))


def _refused(why: str, *nothing: Any) -> Key:
    return Key("refused", why, (None, False, {}, *nothing))


_BUCKETS = "what travels together follows from `zero_optimization.wrap`"
_FP32 = "parameters, gradients and optimizer states are float32"
_NO_PARAMS = "DeepSpeed reads it only if `device` is `nvme`, which is an error: parameters stay in memory"
_OVERLAP = "files are always read ahead and written behind"
_KEPT = "inputs of checkpointed functions stay on their device, whole"
_GONE = "DeepSpeed 0.19 has removed it"
_NO_CURRICULUM = "terrazzo has removed curricula: use a DataLoader with a sampler of your own"
_LAUNCHER = "it belongs to DeepSpeed's launcher"

_TOP = {
    "train_batch_size": _done(),
    "train_micro_batch_size_per_gpu": _done(),
    "gradient_accumulation_steps": _done(),
    "managed_gradient_accumulation": _done("false: every `step()` ends a step; not in pipelines"),
    "gradient_clipping": _done(),
    "gradient_allreduce_op": _done("`mean` or `sum`"),
    "steps_per_print": _done("not whole or infinite: never"),
    "optimizer.type": _done("Adam, AdamW, Adagrad, Lamb, Lion, Muon, and the names of `torch.optim`"),
    "optimizer.params": _done(),
    "optimizer.legacy_fusion": _harmless("there are no fused kernels of its own"),
    "scheduler.type": _done("DeepSpeed's five, and the names of `torch.optim.lr_scheduler`"),
    "scheduler.params": _done(),
    "communication_data_type": _done("in what gradients are reduced; if it is missing, in float32"),
    "seq_parallel_communication_data_type": _harmless("gradients are reduced as `communication_data_type` says"),
    "dataloader_drop_last": _done("of `terrazzo.deepspeed`'s loaders; the engine's own never ends"),
    "seed": _done("terrazzo's own: of the order of the data"),
    "sparse_gradients": _refused(_GONE + ", and so has terrazzo: leave it out, gradients are reduced whole"),
    "prescale_gradients": _harmless("gradients are averaged in one go"),
    "gradient_predivide_factor": _harmless("gradients are averaged in one go"),
    "disable_allgather": _harmless(_BUCKETS),
    "zero_allow_untested_optimizer": _harmless("any optimizer of PyTorch's works"),
    "zero_force_ds_cpu_optimizer": _harmless("any optimizer of PyTorch's works"),
    "wall_clock_breakdown": _harmless("torch.profiler shows more"),
    "memory_breakdown": _harmless("torch.profiler shows more"),
    "dump_state": _harmless("print the engine's config"),
    "log_level": _harmless(
        "`terrazzo.deepspeed` sets the level of its logger, which is Python's; other loggers stay as they are"
    ),
    "disable_python_gc": _harmless("the garbage collector is the program's"),
    "vocabulary_size": _harmless("DeepSpeed only warns about it"),
    "timers": _harmless("torch.profiler shows more"),
    "data_parallel_size": _harmless("it follows from the ranks"),
    "sequence_parallel_size": _done("the engine cuts sequences; Hugging Face's models with attention by `sdpa`"),
    "sequence_parallel_method": _done("terrazzo's own: `ulysses`, as DeepSpeed's, or `ring`"),
    "use_data_before_expert_parallelism": _done(
        "for checkpoints in DeepSpeed's layout; here neighbouring ranks have different experts, with the same numbers"
    ),
    "expert_parallel": _refused(
        "layers are not replaced: use deepspeed.moe.layer.MoE, or terrazzo.tensor.parallel.ExpertParallel"
    ),
    "hybrid_engine": _refused("there is no engine that generates"),
    "weight_quantization": _refused("weights are not quantized"),
    "pipeline": _harmless("`PipelineModule` takes over `activation_checkpoint_interval`, and is told the rest"),
    "autotuning": _refused(_LAUNCHER),
    "datastates_ckpt": _refused(
        "checkpoints are terrazzo's; `save_checkpoint(async_op=True)` writes in the background"
    ),
    "elasticity": _refused(_GONE + "; a checkpoint resumes on any number of ranks"),
    "nebula": _refused(_GONE),
    "compression_training": _refused(_GONE),
    "amp": _refused(_GONE + "; use `bf16`, `fp16` or `torch_autocast`"),
    "quantize_training": _refused(_GONE),
    "eigenvalue": _refused(_GONE),
    "sparse_attention": _refused(_GONE),
    "graph_harvesting": _refused(_GONE),
    "progressive_layer_drop": _refused(_GONE),
    "curriculum_learning": _refused(_NO_CURRICULUM),
}

_ZERO = {
    "stage": _done(),
    "wrap": _done("terrazzo's own: class names of modules that are gathered together"),
    "sub_group_size": _done("for checkpoints in DeepSpeed's layout"),
    "round_robin_gradients": _done("for checkpoints in DeepSpeed's layout"),
    "zero_hpz_partition_size": _mapped("`reshard_after_forward` of so many ranks"),
    "mics_shard_size": _mapped("HSDP: so many ranks shard, the others replicate; " + _GONE),
    "mics_hierarchical_params_gather": _harmless(_GONE),
    "cpu_offload": _mapped("`offload_optimizer.device`"),
    "cpu_offload_param": _mapped("`offload_param.device`"),
    "cpu_offload_use_pin_memory": _harmless("see `offload_optimizer.pin_memory`"),
    "ignore_unused_parameters": _warned("a parameter that no rank used has no gradient, which is no error", True),
    "leaf_module.classes": _done("modules that are gathered and reduced as one, see `utils.set_z3_leaf_modules`"),
    "leaf_module.names": _done(),
    "leaf_module.name_suffixes": _done(),
    "zero_quantized_weights": _done("matrices are gathered as int8, in blocks of 256 of a row; vectors as they are"),
    "zero_quantized_nontrainable_weights": _refused("use `zero_quantized_weights`, which is for all matrices"),
    "zero_quantized_gradients": _done("those of matrices are sent as int8, in such blocks, and added in float32"),
    "zeropp_loco_param": _refused(_GONE),
    "zenflow": Key("refused", "the optimizer steps with all gradients", (None, False)),  # {} enables it
    "elastic_checkpoint": _harmless("every checkpoint is"),
    "load_from_fp32_weights": _warned("weights are loaded in float32", True),
    "pipeline_loading_checkpoint": _harmless("ranks read what they need"),
    "compute_grad_norm": _harmless("the norm is computed where it is needed"),
    "enable_sanity_checks": _harmless("checks are always on"),
    "log_trace_cache_warnings": _harmless("there is no such cache"),
    "save_muon_momentum_buffer_in_memory": _harmless("it is a state like others"),
    "memory_efficient_linear": _harmless("PyTorch's is"),
    "override_module_apply": _harmless("`apply` sees shards"),
    "legacy_stage1": _harmless("there is one stage 1"),
    **{
        key: _harmless(_BUCKETS)
        for key in ("allgather_partitions", "overlap_comm", "reduce_scatter", "use_multi_rank_bucket_allreduce")
    },
    # These bound the memory in which DeepSpeed communicates, and what it keeps whole; with DeepSpeed's defaults.
    "contiguous_gradients": _warned(_BUCKETS, True),
    "parameter_alignment": _warned(_BUCKETS, False),
    "allgather_bucket_size": _warned(_BUCKETS, 500_000_000),
    "reduce_bucket_size": _warned(_BUCKETS, 500_000_000),
    **{
        key: _warned(_BUCKETS, default)
        for name, default in (
            ("allgather_sequential", False),
            ("max_live_parameters", 1_000_000_000),
            ("max_reuse_distance", 1_000_000_000),
            ("model_persistence_threshold", sys.maxsize),
            ("module_granularity_threshold", 0),
            ("param_persistence_threshold", 100_000),
            ("prefetch_bucket_size", 50_000_000),
            ("use_all_reduce_for_fetch_params", False),
        )
        for key in (name, f"stage3_{name}")
    },
    **{
        key: _harmless("`save_16bit_model` of `terrazzo.deepspeed` asks for it; nothing else does")
        for key in (
            "gather_16bit_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    },
    "offload_optimizer.device": _done("`none`, `cpu` or `nvme`, here in stage 0 too: only the state is in files"),
    "offload_optimizer.pin_memory": _done(),
    "offload_optimizer.nvme_path": _done("the files in it have no names, and end with the run"),
    "offload_optimizer.buffer_count": _done("how many pieces of the state are in memory at once"),
    "offload_optimizer.buffer_size": _done("terrazzo's own: bytes of state in one piece, if it is not one tensor's"),
    "offload_optimizer.step_on": _done("terrazzo's own: `device` keeps only the optimizer's state on the CPU"),
    "offload_param.device": _done("`none` or `cpu`"),
    "offload_param.pin_memory": _done(),
    **{f"offload_optimizer.{key}": _harmless(_OVERLAP) for key in ("pipeline_read", "pipeline_write")},
    "offload_optimizer.cpuadam_cores_perc": _harmless("the optimizer has the threads of PyTorch"),
    "offload_optimizer.fast_init": _harmless("state is made in the first step"),
    "offload_optimizer.ratio": _warned("all of it is offloaded", 1.0),
    "offload_optimizer.super_offload": _warned("all of it is offloaded", False),
    **{
        f"offload_param.{key}": _harmless(_NO_PARAMS)
        for key in ("buffer_count", "buffer_size", "max_in_cpu", "nvme_path")
    },
}

_PRECISION = {
    "fp16.enabled": _done(),
    "fp16.loss_scale": _done(),
    "fp16.initial_scale_power": _done(),
    "fp16.loss_scale_window": _done(),
    "fp16.hysteresis": _done(),
    "fp16.consecutive_hysteresis": _done(),
    "fp16.min_loss_scale": _done(),
    "fp16.auto_cast": _harmless("inputs are always cast"),
    "fp16.fp16_master_weights_and_grads": _refused(_FP32),
    "bf16.enabled": _done(),
    "bf16.check_grad_overflow": _done("the host waits for it in every step"),
    "bf16.immediate_grad_update": _harmless("gradients are reduced as they come"),
    "bf16.bf16_master_weights_and_grads": _done("together with the next"),
    "bf16.bf16_optimizer_states": _done("gradients are reduced as `communication_data_type` says, then rounded"),
    "bfloat16": _mapped("`bf16`"),
    "torch_autocast.enabled": _done("without `bf16` and `fp16`: together with one of them it is an error"),
    "torch_autocast.dtype": _done("`bfloat16`, also if it is missing; for float16 use `fp16`"),
    "torch_autocast.lower_precision_safe_modules": _warned("parameters are sent in float32"),
    "data_types.grad_accum_dtype": _warned("gradients add up in float32", "fp32", "float32", "float", "torch.float32"),
    "data_types.param_dtype": _refused("see `bf16` and `fp16`", "fp32", "float32", "auto"),
    "data_types.buffer_dtype": _refused("buffers keep their dtype", "auto"),
    "data_types.keep_in_fp32_modules": _done("of buffers, as in DeepSpeed; others keep their dtype"),
}

_REPORTS = {
    "tensorboard.enabled": _done("through torch.utils.tensorboard"),
    "tensorboard.output_path": _done(),
    "tensorboard.job_name": _done(),
    "csv_monitor.enabled": _done(),
    "csv_monitor.output_path": _done(),
    "csv_monitor.job_name": _done(),
    "wandb.enabled": _done("through wandb"),
    "wandb.group": _done(),
    "wandb.team": _done(),
    "wandb.project": _done(),
    "comet": _refused("there is no monitor for it: use engine.watchers"),
    "flops_profiler.enabled": _done("through torch.utils.flop_counter, of one forward"),
    "flops_profiler.profile_step": _done(),
    "flops_profiler.module_depth": _done(),
    "flops_profiler.output_file": _done(),
    "flops_profiler.recompute_fwd_factor": _harmless("only forward is counted"),
    "flops_profiler.top_modules": _harmless("all modules are shown"),
    "flops_profiler.detailed": _harmless("the report has one form"),
    "comms_logger.enabled": _done("see `comm.log_summary`"),
    "comms_logger.verbose": _done("log every collective"),
    "comms_logger.prof_all": _harmless("all are counted"),
    "comms_logger.prof_ops": _harmless("all are counted"),
    "comms_logger.debug": _harmless("the report has one form"),
}

_CURRICULUM = "it belongs to a curriculum"
_RANDOM_LTD = "it belongs to random-LTD"

_DATA = {
    "enabled": _harmless("its sections are used without it"),
    "seed": _harmless("the order depends on `seed` at the top"),
    "data_sampling.enabled": _harmless("the section is used without it"),
    "data_sampling.num_epochs": _harmless("the order has no end"),
    "data_sampling.num_workers": _done("processes that load data"),
    "data_sampling.pin_memory": _done(),
    "data_sampling.dynamic_batching": _refused("batches are of one size"),
    "data_sampling.curriculum_learning.enabled": _refused(_NO_CURRICULUM),
    "data_sampling.curriculum_learning.curriculum_metrics": _harmless(_CURRICULUM),
    "data_sampling.curriculum_learning.data_cluster_path": _harmless(_CURRICULUM),
    "data_routing.enabled": _harmless(_RANDOM_LTD),
    "data_routing.random_ltd.enabled": _refused(
        "terrazzo has removed random-LTD, so layers process all tokens: select tokens in the model's forward"
    ),
    **{
        f"data_routing.random_ltd.{key}": _harmless(_RANDOM_LTD)
        for key in (
            "attention_mask",
            "consumed_layer_tokens",
            "global_batch_size",
            "hidden_state_order",
            "layer_token_lr_schedule",
            "micro_batch_size",
            "model_mask_name",
            "model_type",
            "random_ltd_layer_id",
            "random_ltd_layer_num",
            "random_ltd_schedule",
            "sample_idx",
            "total_layer_num",
        )
    },
}

_OTHERS = {
    **{
        f"activation_checkpointing.{key}": _warned(_KEPT, False)
        for key in ("contiguous_memory_optimization", "cpu_checkpointing", "partition_activations")
    },
    **{
        f"activation_checkpointing.{key}": _harmless(_KEPT)
        for key in ("number_checkpoints", "profile", "synchronize_checkpoint_boundary")
    },
    "aio.block_size": _done("bytes of one read or write"),
    "aio.queue_depth": _done("reads and writes at once, for each of `intra_op_parallelism`"),
    "aio.intra_op_parallelism": _done("times `queue_depth`, at most 64, is the number of threads"),
    "aio.overlap_events": _harmless("threads read and write, not libaio"),
    "aio.single_submit": _harmless("threads read and write, not libaio"),
    "aio.use_gds": _warned("state is read to the CPU, where the optimizer steps", False),
    "checkpoint.tag_validation": _harmless(
        "different tags are always an error: one checkpoint has the parts of all ranks", "ignore", "warn", "fail"
    ),
    "checkpoint.load_universal": _harmless("such checkpoints are recognised"),
    "checkpoint.use_node_local_storage": _refused("all ranks see the checkpoint's folder"),
    "checkpoint.parallel_write": _harmless("every rank writes its part"),
    "checkpoint.type": _harmless("checkpoints are terrazzo's"),
    "checkpoint.writer": _harmless("checkpoints are terrazzo's"),
    "compile.deepcompile": _refused("use engine.compile(), which is torch.compile"),
    **{
        f"compile.{key}": _harmless("it is for `deepcompile`")
        for key in (
            "autoep_non_moe",
            "debug_log",
            "double_buffer",
            "free_activation",
            "free_activation_threshold",
            "keep_all_input_tensors",
            "keep_int_input_tensors",
            "offload_activation",
            "offload_activation_pin_memory",
            "offload_opt_states",
            "offload_parameters",
            "passes",
            "symmetric_memory",
            "sync_after_allgather",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_before_reduce",
        )
    },
    "tensor_parallel.autotp_size": _done(
        "by the plan that a model of Hugging Face carries, under `terrazzo.install()`"
    ),
    **{
        f"tensor_parallel.{key}": _harmless("it is for `autotp_size`")
        for key in (
            "dtype",
            "injection_policy_tuple",
            "keep_module_on_host",
            "kernel_inject",
            "partition_config",
            "preset_model",
            "replace_with_kernel_inject",
            "tensor_parallel",
            "tp",
            "tp_overlap_comm",
            "vocab_parallel_ce_backend",
            "vocab_parallel_lm_head",
        )
    },
}

KEYS: Final[dict[str, Key]] = {
    **_TOP,
    **{f"zero_optimization.{key}": entry for key, entry in _ZERO.items()},
    **_PRECISION,
    **_REPORTS,
    **{f"data_efficiency.{key}": entry for key, entry in _DATA.items()},
    **_OTHERS,
}

SECTIONS: Final = frozenset(path[:i] for path in KEYS for i in range(len(path)) if path[i] == ".")
"""Keys that contain further keys."""

LENIENT: Final = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "checkpoint",
        "data_efficiency",
        "data_types",
        "flops_profiler",
        "optimizer",
        "scheduler",
    }
)
"""Sections in which DeepSpeed ignores unknown keys; in the others they are an error, as here."""

AUTO: Final[dict[str, Any]] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 0,
    "fp16.enabled": False,
    "bf16.enabled": False,
}
"""The values of `"auto"` where no Trainer of Transformers has filled it in: the defaults of the Trainer's arguments.

None means that the key is treated as absent; the engine chooses every other `"auto"` itself.
"""
