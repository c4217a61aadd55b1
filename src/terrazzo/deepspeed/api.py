"""`initialize` and the command-line arguments of scripts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from terrazzo.deepspeed.comm import init_distributed, initialize_mesh_device
from terrazzo.deepspeed.engine import DeepSpeedEngine, Results, results_of
from terrazzo.deepspeed.engines import check_new
from terrazzo.deepspeed.moe.layer import MoE
from terrazzo.deepspeed.optimizer import NoOptimizer
from terrazzo.deepspeed.pipe.engine import PipelineEngine
from terrazzo.deepspeed.pipe.module import PipelineModule
from terrazzo.deepspeed.settings import known_keys
from terrazzo.deepspeed.utils import groups
from terrazzo.engine import initialize as make_engine
from terrazzo.engine.config import as_mapping, read_config
from terrazzo.engine.lr import SchedulerLike
from terrazzo.engine.optim import OptimizerLike, Parameters
from terrazzo.errors import EngineCallError, EngineConfigError


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Results:
    """Make a training engine, as `deepspeed.initialize` does.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> settings = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    >>> engine, optimizer, _, _ = initialize(model=model, model_parameters=model.parameters(), config=settings)
    >>> loss = engine(torch.ones(2, 4)).square().mean()
    >>> _ = engine.backward(loss)
    >>> engine.step()
    >>> engine.global_steps, optimizer.param_groups[0]["lr"]
    (1, 0.1)

    Args:
        args: An object with `deepspeed_config`, the path of the config, as `add_config_arguments` makes it.
        model: The model to train; a `PipelineModule` gives a `PipelineEngine`.
        optimizer: An optimizer of the model's parameters, or a function that makes one from parameters; it takes
            precedence over the config's.
        model_parameters: What the optimizer trains: parameters or param groups.
        training_data: The dataset of the data loader.
        lr_scheduler: A scheduler of the optimizer, or a function that makes one for it; it takes precedence over the
            config's.
        distributed_port: The port at which ranks meet, if the environment does not say.
        mpu: Not supported: parallelize the model with `terrazzo.tensor.parallel`, and pass it to
            `terrazzo.engine.initialize`.
        dist_init_required: Whether to initialise `torch.distributed`; None: if it has not been.
        collate_fn: Makes a batch of samples.
        config: A mapping, JSON, or a path.
        mesh_param: The data-parallel and sequence-parallel sizes; the second is `sequence_parallel_size`.
        config_params: The same as `config`.

    Returns:
        The engine, its optimizer, the data loader and the lr scheduler; None for those that do not exist.
    """
    if model is None:
        raise EngineCallError("initialize needs a model: pass model=")
    check_new(model)
    if mpu is not None:
        raise EngineConfigError(
            "mpu is not supported: parallelize the model with terrazzo.tensor.parallel.parallelize_module, and pass it "
            "with its mesh to terrazzo.engine.initialize"
        )
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if mesh_param is not None:
        initialize_mesh_device(mesh_param, ("data_parallel", "sequence_parallel"))
    given = known_keys(as_mapping(_only_config(args, config, config_params)))
    if mesh_param is not None:
        given.setdefault("sequence_parallel_size", mesh_param[1])
    if optimizer is not None:  # as in DeepSpeed, an optimizer that is passed takes precedence
        given.pop("optimizer", None)
    elif "optimizer" not in given:
        optimizer = NoOptimizer
    if lr_scheduler is not None:
        given.pop("scheduler", None)
    if optimizer is NoOptimizer and lr_scheduler is None:
        given.pop("scheduler", None)
    if optimizer is not NoOptimizer:
        _keep_in_float32(model, given)
    if isinstance(model, PipelineModule):
        core = make_engine(
            model.as_stage(given),
            optimizer,
            lr_scheduler,
            config=given,
            parameters=model_parameters,
            pipeline=model.schedule,
            loss_fn=model.loss,
            mesh=model.mesh,
            tied=model.tied,
        )
        return results_of(PipelineEngine(core, given, training_data, collate_fn))
    core = make_engine(model, optimizer, lr_scheduler, config=given, parameters=model_parameters)
    for size in dict.fromkeys(module.ep_size for module in model.modules() if isinstance(module, MoE)):
        groups._create_expert_and_data_parallel(size, data=core.ranks.data_mesh)
    return results_of(DeepSpeedEngine(core, given, training_data, collate_fn))


def _keep_in_float32(model: nn.Module, given: dict[str, Any]) -> None:
    """Let a model in 16 bits compute so, and be trained in float32: DeepSpeed's ZeRO does it without being told."""
    config = read_config(given)[0]
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    told = config.bf16.enabled or config.fp16.enabled or config.torch_autocast.enabled
    if told or config.zero_optimization.stage == 0:
        return
    if dtypes == {torch.bfloat16}:
        given["bf16"] = {"enabled": True, "check_grad_overflow": False}
    elif dtypes == {torch.float16}:
        given["fp16"] = {"enabled": True, "loss_scale": 1.0}


def _only_config(args: Any, config: Any, config_params: Any) -> Any:
    """The config, which may be passed in one of three ways."""
    named = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        raise EngineConfigError("there is no config: pass config= or the option --deepspeed_config")
    if len(given) > 1:
        raise EngineConfigError(f"a config was passed as {' and as '.join(given)}; pass only one of them")
    return next(iter(given.values()))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--deepspeed` and `--deepspeed_config` to a parser.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"]).deepspeed_config
    'ds.json'
    """
    group = parser.add_argument_group("DeepSpeed", "the training engine")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine's config, as JSON")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser
