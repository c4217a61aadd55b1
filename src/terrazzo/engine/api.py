"""`initialize`: makes an engine from a model."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from terrazzo.engine.config import Batch, EngineConfig, read_config
from terrazzo.engine.engine import Engine
from terrazzo.engine.loaders import StatefulLoader, checked_loader
from terrazzo.engine.lr import SchedulerLike
from terrazzo.engine.marks import mark, tell_of_config_errors
from terrazzo.engine.optim import OptimizerLike, Parameters
from terrazzo.engine.pipeline import LossFunction, Pipeline, ScheduleFactory, Stage, as_stages
from terrazzo.engine.placing import RankRoles
from terrazzo.engine.plans import cut_by_plan
from terrazzo.engine.sampler import ResumableSampler
from terrazzo.errors import EngineConfigError

LOGGER = logging.getLogger("terrazzo.engine")


def initialize(
    model: nn.Module | Stage | Sequence[Stage],
    optimizer: OptimizerLike | None = None,
    lr_scheduler: SchedulerLike | None = None,
    training_data: Dataset[Any] | None = None,
    *,
    training_dataloader: StatefulLoader | None = None,
    parameters: Parameters | None = None,
    config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    data_dim: str = "dp",
    pipeline: ScheduleFactory | None = None,
    loss_fn: LossFunction | None = None,
    pipeline_dim: str = "pp",
    tied: Mapping[str, str] | None = None,
    init_weights: Callable[[nn.Module], Any] | None = None,
    compile: bool | str = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Engine:
    """Make a training engine.

    The model is sharded in place, as the ZeRO stage requires; all ranks start with rank 0's values.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    >>> engine = initialize(model, config=config)
    >>> loss = engine(torch.ones(2, 4)).square().mean()
    >>> _ = engine.backward(loss)
    >>> engine.step()
    >>> engine.global_steps, engine.global_samples
    (1, 2)

    Args:
        model: Its parameters may be tensor-parallel already, on other dims of `mesh`. Or this rank's `PipelineStage` of
            `torch.distributed.pipelining`, or several, whose parts have the names that they have in the whole model.
        optimizer: Built from `model.parameters()`, or a function that builds one from parameters; None: the one that
            `config.optimizer` describes.
        lr_scheduler: A scheduler of that optimizer, or a function that makes one for an optimizer; None: the one that
            `config.scheduler` describes.
        parameters: What the optimizer is made of if it is not passed: parameters of the model, or param groups; None:
            all that require gradients.
        training_data: The dataset of `Engine.training_dataloader`, shuffled and divided among the ranks.
        training_dataloader: Instead of training_data, a loader of this rank's batches that has `state_dict` and
            `load_state_dict`, as torchdata's `StatefulDataLoader` has: its position is saved and restored with the run.
        config: An `EngineConfig`, a mapping, JSON, or the path of a file with JSON; DeepSpeed's keys are accepted.
        mesh: The ranks that train; None: all. If it has more than one dim, `data_dim` names the data-parallel one. With
            `tensor_parallel.autotp_size`: None, or a mesh with a dim "tp" of that size.
        pipeline: For stages: the class of a schedule, or a function that makes one from a stage (or the list of them),
            `n_microbatches`, which is `gradient_accumulation_steps`, `loss_fn` and `scale_grads`.
        loss_fn: For stages: the loss of a micro-batch, from the last stage's output and the target.
        pipeline_dim: For stages: the dim of `mesh` along which they are distributed.
        tied: For stages: names of parameters that share their values with a parameter of another stage, each with its
            name there, as {"head.weight": "embed.weight"}.
        init_weights: For a model that was made on the meta device: a function that initialises the sharded model;
            None: each module's `reset_parameters()`.
        compile: Compile the modules that are gathered together with `terrazzo.compile`: True, or the backend's name.
        collate_fn: Makes a batch of samples, for the data loader.
    """
    tell_of_config_errors()
    checked, ignored = read_config(config)
    if ignored.harmless:
        LOGGER.info("config: these keys have no effect here and are ignored: %s", ", ".join(ignored.harmless))
    trained: nn.Module | Pipeline
    if isinstance(model, nn.Module):
        if pipeline is not None or loss_fn is not None or tied is not None:
            raise EngineConfigError(
                "pipeline, loss_fn and tied are for pipelines, but model is not a PipelineStage: pass stages as the "
                "model, or leave these arguments out"
            )
        if checked.tensor_parallel.autotp_size > 1:
            mesh = cut_by_plan(model, checked.tensor_parallel.autotp_size, mesh, data_dim)
        ranks = RankRoles.of(mesh, data_dim, None, checked)
        trained = model
    else:
        if checked.tensor_parallel.autotp_size > 1:
            raise EngineConfigError(
                "config: tensor_parallel.autotp_size does not support pipeline stages: cut their modules with "
                "terrazzo.tensor.parallel.parallelize_module"
            )
        if not checked.managed_gradient_accumulation:
            raise EngineConfigError(
                "config: managed_gradient_accumulation does not support pipelines, in which train_batch ends a step: "
                "leave it out"
            )
        ranks = RankRoles.of(mesh, data_dim, pipeline_dim, checked)
        trained = _pipeline(as_stages(model), pipeline, loss_fn, ranks, tied or {})
    if ignored.warned and dist.get_rank() == 0:
        warnings.warn(f"config: these keys have no effect here: {ignored.warning()}", stacklevel=2)
    backend = "inductor" if compile is True else compile or None
    if backend is not None and isinstance(trained, Pipeline):
        raise EngineConfigError(
            "compile= does not support pipeline stages: compile their modules with terrazzo.compile"
        )
    mark("made")
    engine = Engine(trained, optimizer, lr_scheduler, checked, ranks, parameters, init_weights, backend)
    if training_dataloader is not None:
        if training_data is not None:
            raise EngineConfigError("both training_data and training_dataloader were passed; pass one of them")
        engine.training_dataloader = engine.stateful_loader = checked_loader(training_dataloader)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, engine, collate_fn)
    return engine


def _pipeline(
    stages: list[Stage],
    make: ScheduleFactory | None,
    loss_fn: LossFunction | None,
    ranks: RankRoles,
    tied: Mapping[str, str],
) -> Pipeline:
    if make is None or loss_fn is None:
        raise EngineConfigError("a model of stages needs pipeline= (such as Schedule1F1B) and loss_fn=")
    if not callable(make):
        raise EngineConfigError(
            f"pipeline is {make!r}: pass the class of the schedule, or functools.partial of it; the engine creates the "
            "schedule, because it decides the number of micro-batches and scales the loss"
        )
    assert ranks.pipeline is not None
    return Pipeline(stages, make, loss_fn, ranks.pipeline, tied)


def _loader(data: Dataset[Any], engine: Engine, collate_fn: Callable[[list[Any]], Any] | None) -> DataLoader[Any]:
    if not hasattr(data, "__len__"):
        raise EngineConfigError(
            "training_data has no length, so its order cannot be resumed: pass a dataset with a length, or iterate "
            "over it without passing it"
        )
    axis, batch = engine.ranks.samples, engine.batch
    if engine.pipeline is not None:  # the schedule cuts a rank's batch into micro-batches itself
        batch = Batch(batch.total, batch.micro * batch.accumulation, 1)
    sampler = ResumableSampler(len(data), batch, rank=axis.index, ranks=axis.size, seed=engine.config.seed)
    engine.data_sampler = sampler
    sampling = engine.config.data_efficiency.data_sampling
    return _Loader(
        data,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=sampling.num_workers,
        pin_memory=sampling.pin_memory,
    )


class _Loader(DataLoader[Any]):
    """Begins without a number of the program's generator: a run that resumes draws what it would have drawn."""

    def __iter__(self) -> Any:
        sampler = self.batch_sampler
        assert isinstance(sampler, ResumableSampler)
        self.generator = sampler.generator()  # of the seeds of worker processes
        with torch.device("cpu"):  # where that generator is, whatever the default
            return super().__iter__()
