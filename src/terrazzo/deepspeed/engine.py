"""`DeepSpeedEngine`: the engine as an `nn.Module` with DeepSpeed's methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from terrazzo.comm import ControlPlane
from terrazzo.deepspeed.dataloader import DeepSpeedDataLoader, make_loader
from terrazzo.deepspeed.engines import forget, load_whole, remember, show_between_steps, shows_whole
from terrazzo.deepspeed.offloading import check_reloaded, offload_states, reload_states
from terrazzo.deepspeed.optimizer import DeepSpeedOptimizer, NoOptimizer, view_of
from terrazzo.deepspeed.settings import SETTINGS, setting, setting_of
from terrazzo.deepspeed.utils import logger
from terrazzo.deepspeed.utils.sharded import whole
from terrazzo.deepspeed.zero.config import OffloadDeviceEnum, OffloadStateTypeEnum
from terrazzo.deepspeed.zero.status import mark
from terrazzo.engine import Engine
from terrazzo.engine.lr import Scheduler
from terrazzo.engine.saving import refuse_unfinished
from terrazzo.errors import EngineConfigError, EngineError

Results = tuple["DeepSpeedEngine", DeepSpeedOptimizer | None, DataLoader[Any] | None, Scheduler | None]

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT = "train", "eval", "predict"


class DeepSpeedEngine(nn.Module):
    """Trains a model; created by `terrazzo.deepspeed.initialize`.

    An attribute that it does not have is looked up in `core`, then in the model.

    Attributes:
        core: the `terrazzo.engine.Engine` that does the work.
        module: the model, sharded.
        optimizer: the model's optimizer; None if there is none.
        training_dataloader: the loader of the data that was passed to `initialize`.
        config: the config as it was passed.
    """

    def __init__(
        self,
        core: Engine,
        config: Mapping[str, Any],
        training_data: Dataset[Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__()
        self.core = core
        self.module: Any = core.module
        self.config = dict(config)
        if (level := setting(self.config, "log_level")) is not None:
            _set_log_level(level)
        self.collate_fn = collate_fn
        self.optimizer = None if isinstance(core.optimizer, NoOptimizer) else view_of(core)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        remember(core)
        mark(core.module)
        core.show = partial(show_between_steps, core)
        core.show()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name in ("core", "module"):
                raise
        if name == "communication_data_type":  # a property in DeepSpeed
            return setting_of(self.core, self.config, name)
        if name in SETTINGS:
            return lambda: setting_of(self.core, self.config, name)
        for other in (self.core, self.module):
            if hasattr(other, name):
                return getattr(other, name)
        raise AttributeError(f"neither {type(self).__name__} nor the model has an attribute {name!r}")

    # ------------------------------------------------------------------ a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.core(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of a micro-batch's mean loss; returns it divided by the number of micro-batches."""
        return self.core.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def _backward_epilogue(self) -> None:
        """Does nothing: DeepSpeed's guide calls it after `backward` of a loss that several engines share."""

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; after the last one of a step, run the optimizer."""
        if self.optimizer is None:
            raise EngineError(
                "step() needs an optimizer: pass one to deepspeed.initialize, or describe it in the config's "
                "`optimizer`"
            )
        check_reloaded(self.core)
        self.core.step(lr_kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that were accumulated inside `no_sync()`."""
        self.module.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the model."""
        return self.core.step_applied

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which gradients are not reduced; only in stages 0 and 1."""
        return self.core.no_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """A block in which gradients of several backwards are accumulated; the next step reduces them, in any stage."""
        return self.core.accumulate("coalesce_grad_reduction()")

    # ------------------------------------------------------------------ data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's part of a dataset; one for evaluation is not shuffled.

        Without `num_local_io_workers` the data is read in this process.
        """
        return make_loader(
            dataset,
            batch_size=batch_size or self.core.batch.micro,
            rank=self.core.ranks.samples.index,
            ranks=self.core.ranks.samples.size,
            shuffle=route == ROUTE_TRAIN,
            drop_last=bool(setting(self.config, "dataloader_drop_last")),
            pin_memory=pin_memory and torch.accelerator.is_available(),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers or 0,
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any], Any]) -> None:
        """Apply a function to every batch of the training data."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches."""
        self.core.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of a micro-batch."""
        self.core.set_train_batch_size(
            micro_batch_size * self.core.batch.accumulation * self.core.dp_world_size, micro=micro_batch_size
        )

    # ------------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole state of the run; returns True."""
        self.core.save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters).result()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume; returns the checkpoint's path and the client state, or None and None."""
        if custom_load_fn is not None:
            raise EngineError(
                "custom_load_fn is not supported: the state of a module is never whole in one file. Load the values "
                "yourself, and pass them to load_module_state_dict"
            )
        path, client_state = self.core.load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        return (None, None) if path is None else (path, client_state)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state: whole, plain tensors in stages 0 to 2 between steps; else DTensors in float32."""
        if shows_whole(self.core):
            state = self.module.state_dict(keep_vars=keep_vars)
            if exclude_frozen_parameters:
                parameters = dict(self.module.named_parameters(remove_duplicate=False))
                state = {n: v for n, v in state.items() if n not in parameters or parameters[n].requires_grad}
        else:
            state = self.core.module_state_dict(exclude_frozen_parameters)
        named = {prefix + name: value for name, value in state.items()}
        if destination is None:
            return named
        destination.update(named)
        return destination

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole model in the precision of forward, as `torch.save` does; call it on all ranks.

        In stage 3 without `stage3_gather_16bit_weights_on_model_save` it saves nothing and returns False.
        """
        if self.core.stage == 3 and not setting(self.config, "zero_gather_16bit_weights_on_model_save"):
            return False
        refuse_unfinished(self.core, "save_16bit_model")
        gathered = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        path = os.path.join(save_dir, save_filename)

        def write() -> None:
            if gathered is not None:
                os.makedirs(save_dir, exist_ok=True)
                torch.save(gathered, path)

        ControlPlane.for_group().run_together(write, f"writing {path}")
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model in the precision of forward, on the first rank; called on all ranks. Trainers use it."""
        gathered: dict[str, Any] = {}
        for name, value in self.core.module_state_dict(exclude_frozen_parameters).items():
            first = self.core.shared_params.get(name)
            if first in gathered:
                gathered[name] = gathered[first]
            elif isinstance(value, Tensor):
                tensor = whole(value).cpu()  # a gather, so all ranks must run this loop
                trained = name not in self.core.buffer_names() and tensor.is_floating_point()
                gathered[name] = tensor.to(self.core.dtype) if trained else tensor
            else:
                gathered[name] = value
        self.core.show()
        return gathered if dist.get_rank() == 0 else None

    # ------------------------------------------------------------------ queries

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each param group."""
        groups = self.core.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The type of each param group, if it has one."""
        return [group.get("type", 0.0) for group in self.core.optimizer.param_groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """The sizes of a step: its samples, those of a micro-batch, and the number of micro-batches."""
        return self.core.batch.total, self.core.batch.micro, self.core.batch.accumulation

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that see different data."""
        return self.core.ranks.samples.index

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype in which the model computes, and the one in which gradients are accumulated."""
        return self.core.dtype, torch.float32

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.core.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.core.stage >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is on the CPU."""
        return self.core.config.zero_optimization.offload_optimizer.device == "cpu"

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        """Load the model from a checkpoint's `module`, or from a state dict."""
        load_whole(self.core, checkpoint.get("module", checkpoint), strict)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The engine's optimizer itself, of which `optimizer` is a view."""
        return None if self.optimizer is None else self.core.optimizer

    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied."""
        return self.core.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self.core.loss_scale.value

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that see different data."""
        return self.core.ranks.data.group

    # ------------------------------------------------------------------ other methods

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model's forward with `torch.compile`."""
        if schedule is not None or compiled_autograd_enabled:
            raise EngineError(
                "compile() has neither a schedule of DeepCompile's passes nor compiled autograd: leave `schedule` and "
                "`compiled_autograd_enabled` out"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return getattr(self, "_compiled", False)

    def empty_partition_cache(self) -> None:
        """Reshard all parameters, in stage 3."""
        if self.core.stage == 3:
            self.core.reshard()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move what is on the accelerator to the CPU until `reload_states`, which must be called before the next step.

        Of the parameters, whole ones in the precision of forward, which stages 0 to 2 have between steps, are
        `lp_params`, and are freed. The shards in float32, `hp_params`, stay where they are, which a warning says.

        Args:
            include: What to move; None: everything.
            device: The CPU.
            pin_memory: Has no effect.
            non_blocking: Has no effect.
        """
        offload_states(self.core, include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved."""
        reload_states(self.core)

    def destroy(self) -> None:
        """Release the engine: it is no longer used."""
        forget(self.core)


def _set_log_level(level: Any) -> None:
    try:
        logger.setLevel(str(level).upper())
    except ValueError as error:
        raise EngineConfigError(f"config: log_level must be DEBUG, INFO, WARNING or the like, not {level!r}") from error


def _shared(name: str) -> property:
    """An attribute that is read from and written to `core`."""
    return property(lambda self: getattr(self.core, name), lambda self, value: setattr(self.core, name, value))


for _name in ("global_steps", "global_samples", "micro_steps", "skipped_steps", "lr_scheduler"):
    setattr(DeepSpeedEngine, _name, _shared(_name))


def results_of(engine: DeepSpeedEngine) -> Results:
    """The results of `initialize`."""
    return engine, engine.optimizer, engine.training_dataloader, engine.core.lr_scheduler
