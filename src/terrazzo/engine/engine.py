"""The training engine: a model, its optimizer and the rest of a run's state, on any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.formats.registry import nested
from terrazzo.checkpoint.manager import Which
from terrazzo.checkpoint.stores import Place
from terrazzo.comm import ControlPlane, collectives
from terrazzo.engine.config import Batch, EngineConfig
from terrazzo.engine.content import buffer_names, module_state_dict
from terrazzo.engine.gradients import prepare_gradients
from terrazzo.engine.leaves import advising, mark_configured, refuse_without_forward
from terrazzo.engine.loaders import StatefulLoader
from terrazzo.engine.loss_scale import loss_scale_of
from terrazzo.engine.losses import Losses
from terrazzo.engine.lr import SchedulerLike, make_scheduler
from terrazzo.engine.marks import beat, mark, tokens_in
from terrazzo.engine.monitors import monitors_of, watcher
from terrazzo.engine.optim import OptimizerLike, Parameters, make_optimizer
from terrazzo.engine.paging import PagedState
from terrazzo.engine.pipeline import Pipeline
from terrazzo.engine.placing import RankRoles, compile_together, compute_dtype, reshard, shard_model
from terrazzo.engine.reports import CommsReport, FlopsReport
from terrazzo.engine.sampler import ResumableSampler
from terrazzo.engine.saving import (
    find_to_load,
    load_engine,
    load_step,
    refuse_unfinished,
    save_engine,
    save_step,
)
from terrazzo.engine.sequence import SharedSequences
from terrazzo.errors import EngineCallError, EngineConfigError, EngineError, RankError
from terrazzo.fsdp.module import expect_backward
from terrazzo.layout.drawing import Shown

LOGGER = logging.getLogger("terrazzo.engine")

F = TypeVar("F", bound=Callable[..., Any])


def _with_shards(method: F) -> F:
    """A method of the engine that needs parameters to be shards; afterwards they are what users see."""

    @wraps(method)
    def run(self: Engine, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self.show()
        return result

    return run  # type: ignore[return-value]  # of the same signature


class Engine(Shown):
    """Trains a model. Created by `terrazzo.engine.initialize`.

        for batch in engine.training_dataloader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    `backward` and `step` are called once per micro-batch; the optimizer steps after every
    `gradient_accumulation_steps` of them.

    Attributes:
        module: the model, its parameters sharded as the ZeRO stage requires; in a pipeline, this rank's stages.
        pipeline: the stages and their schedule, in a pipeline; else None.
        optimizer: the optimizer of the sharded parameters.
        pages: steps the optimizer if its state is in files; else None.
        lr_scheduler: stepped after each optimizer step that was not skipped; None if there is none.
        training_dataloader: loads the training data that `initialize` got, or is the loader that it got; None if it got
            neither.
        global_steps: the number of optimizer steps, including the skipped ones.
        skipped_steps: the number of steps that were skipped because gradients overflowed.
        global_samples: the number of samples trained on, on all ranks.
        step_applied: whether the last `step` changed the parameters.
        unfinished: what failed after it had begun to change the run's state, such as "step 7"; else None. Until a
            checkpoint is loaded, `step` and saving are errors then.
        watchers: functions that are called with the engine after each optimizer step, as monitors are.
        show: called whenever the engine has resharded all parameters; does nothing unless another function is set.
        sequences: with `sequence_parallel_size`, how sequences are cut: `sequences.part(y)` is this rank's part of a
            tensor for a loss outside of the model. Else None.
        flops, comms: reports that the config asks for, or None.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        optimizer: OptimizerLike | None,
        lr_scheduler: SchedulerLike | None,
        config: EngineConfig,
        ranks: RankRoles,
        parameters: Parameters | None = None,
        init_weights: Callable[[nn.Module], Any] | None = None,
        compile: str | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.batch = config.batch(ranks.samples.size)
        self.stage = config.zero_optimization.stage
        self.dtype = compute_dtype(config)
        self.pipeline = model if isinstance(model, Pipeline) else None
        whole = model.module if isinstance(model, Pipeline) else model
        mark_configured(whole, config.zero_optimization.leaf_module)
        refuse_without_forward(whole)
        if compile is not None and self.pipeline is None:
            whole = compile_together(whole, config.zero_optimization.wrap, compile)
        names = {id(p): name for name, p in whole.named_parameters()}
        self.shared_params = _shared_names(whole) | (self.pipeline.tied.first if self.pipeline is not None else {})
        for part in model.parts if isinstance(model, Pipeline) else [whole]:
            shard_model(part, config, ranks, init_weights)
        self.module: Any = whole
        self.sequences = None if ranks.sequence is None else SharedSequences(config, ranks.sequence, whole)
        self.optimizer = make_optimizer(optimizer, config.optimizer, whole, names, parameters)
        self.pages: PagedState | None = self._pages()
        self.lr_scheduler = make_scheduler(lr_scheduler, config.scheduler, self.optimizer)
        self.training_dataloader: DataLoader[Any] | StatefulLoader | None = None
        self.stateful_loader: StatefulLoader | None = None
        self.data_sampler: ResumableSampler | None = None
        self.loss_scale = loss_scale_of(config)
        if self.pipeline is not None:
            self.pipeline.prepare(self.batch)
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.step_applied = False
        self.unfinished: str | None = None
        self._has_checkpoint = False
        self.watchers: list[Callable[[Engine], None]] = []
        self.show: Callable[[], None] = lambda: None
        self.losses = Losses(self)
        self.flops, self.comms = self._reports(whole)
        self._boundary: bool | None = None  # set by the user
        self._syncing = True  # not inside `no_sync`
        self._backward = True, True  # whether the next one reduces gradients, and frees the parameters
        self._overflowed = False
        self._has_stepped = False
        self._tokens = 0  # that all ranks have seen, as far as `terrazzo train` shows them
        self._norm: Tensor | None = None
        if self.pipeline is None:
            self.losses.watch(whole)

    def _pages(self) -> PagedState | None:
        """What steps the optimizer if its state is in files; a folder that cannot be used is an error on all ranks."""
        section = self.config.zero_optimization.offload_optimizer
        if section.device != "nvme":
            return None
        return ControlPlane.for_group().run_together(
            lambda: PagedState(self.optimizer, section, self.config.aio), f"opening {section.nvme_path}"
        )

    def _reports(self, module: nn.Module) -> tuple[FlopsReport | None, CommsReport | None]:
        """The reports that the config asks for."""
        first = dist.get_rank() == 0
        config = self.config
        if config.tensorboard.enabled or config.csv_monitor.enabled or config.wandb.enabled:
            try:
                found = ControlPlane.for_group().run_together(
                    lambda: monitors_of(config) if first else [], "opening the config's monitors"
                )
            except RankError as error:
                raise EngineConfigError(str(error)) from error
            self.watchers += [watcher(found)] if found else []
        flops = None
        if first and self.config.flops_profiler.enabled:
            flops = FlopsReport(module, self.config.flops_profiler)
            self.watchers.append(lambda engine: flops.end_step(engine.global_steps))
        return flops, CommsReport(self.config.comms_logger) if self.config.comms_logger.enabled else None

    def __str__(self) -> str:
        batch, ranks = self.batch, self.ranks.samples.size
        return (
            f"Engine for {type(self.module).__name__}: ZeRO stage {self.stage}, {self.dtype}, after step "
            f"{self.global_steps}; a step has {batch.total} samples: {batch.micro} on each of {ranks} ranks, "
            f"{batch.accumulation} times"
        )

    # ------------------------------------------------------------------ a step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        With `sequence_parallel_size` tensors that have the sequence as dim 1 are cut along it, and the outputs are
        those of this rank's part, except losses, whose values are the whole's.
        """
        self._refuse_in_pipeline("forward")
        with ExitStack() as stack:
            stack.enter_context(advising())
            if torch.is_grad_enabled():
                self._tokens += tokens_in(args, kwargs) * self.ranks.samples.size
            if self.sequences is not None:
                args, kwargs = self.sequences.cut(args, kwargs)
                stack.enter_context(self.sequences.attention())
            if self.config.torch_autocast.enabled:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            outputs = self.module(*args, **kwargs)
        return outputs if self.sequences is None else self.sequences.averaged(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the engine."""
        return self(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of this micro-batch's mean loss, and add them to those of earlier micro-batches.

        `loss.backward()` does the same, except in float16, where the loss must be scaled first: see `scale`.

        Args:
            loss: the loss of this rank's micro-batch.
            retain_graph: as in `Tensor.backward`.
            scale_wrt_gas: divide by the number of micro-batches; pass False if the loss is divided already.

        Returns:
            The loss as it is added to the step's: divided, if scale_wrt_gas.
        """
        self._refuse_in_pipeline("backward")
        self._prepare_backward(again=True)
        share = loss / self.batch.accumulation if scale_wrt_gas else loss
        with advising(), self.losses.own_backward():
            # In float32, because the product may overflow the loss's float16.
            (share.float() * self.loss_scale.value).backward(retain_graph=retain_graph)
        share = share.detach()
        self.losses.add(share)
        return share

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for calling `backward()` yourself."""
        self._refuse_in_pipeline("scale")
        self.losses.scaled = True
        return loss.float() * self.loss_scale.value

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last before the optimizer steps.

        Without `managed_gradient_accumulation` this is only known in `step`.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return False
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next micro-batch is the last before the optimizer steps; None: decide by counting."""
        if not self.config.managed_gradient_accumulation:
            raise EngineCallError(
                "set_gradient_accumulation_boundary() does nothing with managed_gradient_accumulation=false, as each "
                "step() ends a step: leave the call out, or the key"
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which gradients are accumulated on each rank and not reduced; not in stages 2 and 3."""
        if self.stage >= 2:
            raise EngineCallError(
                f"the no_sync context manager is incompatible with ZeRO stage {self.stage}: it needs whole gradients "
                f"on every rank, and stage {self.stage} shards them; leave it out, or use stage 0 or 1"
            )
        with self.accumulate("no_sync()"):
            yield

    @contextmanager
    def accumulate(self, name: str = "accumulate()") -> Iterator[None]:
        """A block in which gradients are accumulated, whole, on each rank; the next step reduces them. In every stage.

        Args:
            name: what errors call it.
        """
        if not self._syncing:
            raise EngineCallError(
                f"{name} inside no_sync() or the like: no_sync context manager reentry is unsupported and cannot be "
                "nested; enter one block"
            )
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; after the last one of a step, run the optimizer, unless gradients overflowed.

        Args:
            lr_kwargs: keyword arguments for the lr scheduler's `step`.
        """
        self._refuse_in_pipeline("step")
        refuse_unfinished(self, "step")
        if not self._syncing:
            raise EngineCallError(
                "It is illegal to call Engine.step() inside no_sync context manager, because gradients have not been "
                "reduced: call it after the block"
            )
        boundary = self.is_gradient_accumulation_boundary() or not self.config.managed_gradient_accumulation
        self.micro_steps += 1
        self.step_applied = False
        if boundary:
            with advising():
                self.losses.reduce_rest()
            self._end_step(lr_kwargs or {})

    def _prepare_backward(self, again: bool = False) -> None:
        """Set what happens to this micro-batch's gradients; called before its forward, and `again` before its
        backward."""
        boundary = self.is_gradient_accumulation_boundary()
        sync = (boundary or self.stage >= 2) and self._syncing
        self.losses.expect(sync)
        # The optimizer's step makes unsharded parameters out of date, so the last backward frees them.
        reshards = boundary or self.stage == 3
        if again and (sync, reshards) == self._backward:
            return  # setters walk through the model
        self._backward = sync, reshards
        expect_backward(self.module, reduces=sync, reshards=reshards)

    def train_batch(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """One step of a pipeline: forward, backward, and the optimizer's step.

        Args:
            args: the inputs of the first stage, with the samples of all micro-batches of this rank.
            target: the target of the loss, with the same samples.
            kwargs: passed to every stage. Tensors are cut into micro-batches, as `args` and `target` are.

        Returns:
            The mean loss of the whole batch, on every rank.
        """
        pipeline = self._needs_pipeline("train_batch")
        refuse_unfinished(self, "train_batch")
        with self.losses.own_backward():
            loss = pipeline.train(args, target, kwargs, scale=self.loss_scale.value, zero_stage=self.stage)
        self.micro_steps += self.batch.accumulation
        total = self._averaged(pipeline.total(loss))
        self.losses.add(total)
        self._end_step({})
        return total

    def eval_batch(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """The mean loss of a batch in evaluation mode, on every rank; the arguments are those of `train_batch`."""
        pipeline = self._needs_pipeline("eval_batch")
        return self._averaged(pipeline.total(pipeline.evaluate(args, target, kwargs)))

    def _averaged(self, loss: Tensor) -> Tensor:
        return collectives.all_reduce(loss, self.ranks.data, "avg")

    @torch.no_grad()
    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        copies: set[nn.Parameter] = set()
        if self.pipeline is not None:
            self.pipeline.tied.add_gradients(self.module)
            copies = self.pipeline.tied.uncounted(self.module)
        prepared = prepare_gradients(
            self.optimizer,
            uncounted=copies,
            scale=self.gradient_scale,
            limit=self.config.gradient_clipping,
            may_overflow=self._may_overflow,
            combine=None if self.pipeline is None else self.pipeline.total_norm,
        )
        self._norm = prepared.norm
        samples = self.batch.total
        if not self.config.managed_gradient_accumulation:
            samples = self.losses.backwards * self.batch.micro * self.ranks.samples.size
        self.losses.end_step()
        self.step_applied, self._overflowed = not prepared.overflow, prepared.overflow
        if prepared.overflow:
            self.skipped_steps += 1
            LOGGER.warning(
                "step %d skipped: gradients overflow at loss scale %g", self.global_steps, self.loss_scale.value
            )
        else:
            self.unfinished = f"step {self.global_steps + 1}"
            (self.optimizer if self.pages is None else self.pages).step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.fp16.enabled:
            self.loss_scale.update(prepared.overflow)
        self.global_steps += 1
        self.global_samples += samples
        if self.data_sampler is not None:
            self.data_sampler.end_step()
        self.unfinished = None
        if self.config.steps_per_print is not None and self.global_steps % self.config.steps_per_print == 0:
            rates = ", ".join(f"{rate:g}" for rate in self.get_lr())
            LOGGER.info("step %d, %d skipped, learning rate %s", self.global_steps, self.skipped_steps, rates)
        if not self._has_stepped:
            self._has_stepped = True
            mark("stepped")
        beat(self.global_steps, loss=self.losses.last, samples=self.global_samples, tokens=self._tokens or None)
        self.show()
        for told in list(self.watchers):
            told(self)

    @property
    def _may_overflow(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self.config.fp16.enabled or (self.config.bf16.enabled and self.config.bf16.check_grad_overflow)

    def _refuse_in_pipeline(self, what: str) -> None:
        if self.pipeline is not None:
            raise EngineError(f"{what}: in a pipeline the schedule does this; call train_batch instead")

    def _needs_pipeline(self, what: str) -> Pipeline:
        if self.pipeline is None:
            raise EngineError(f"{what} is for pipelines; call the engine, backward(loss) and step() instead")
        return self.pipeline

    # ------------------------------------------------------------------ checkpoints

    def buffer_names(self) -> list[str]:
        """The names of the buffers that are part of the model's state."""
        return buffer_names(self.module)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state by the names of the unwrapped model; parameters are DTensors in float32."""
        return module_state_dict(self.module, exclude_frozen=exclude_frozen_parameters)

    @_with_shards
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_op: bool = False,
        layout: Literal["native", "deepspeed"] = "native",
        timeout: timedelta | None = None,
    ) -> Future[None]:
        """Save the whole state of the run as `<save_dir>/<tag>`, called by all ranks together.

        Until the new checkpoint is complete and durable, the previous one stays valid, and `<save_dir>/latest` names
        it.

        Args:
            tag: the checkpoint's name; None: `global_step` and the number of steps.
            client_state: further values to store, the same on all ranks (or wrapped in `terrazzo.checkpoint.PerRank`);
                `load_checkpoint` returns them. Names of the engine's counters and descriptions are an error.
            save_latest: whether `latest` is changed to name this checkpoint.
            exclude_frozen_parameters: leave out parameters that are not trained.
            layout: `deepspeed` writes what DeepSpeed resumes from, on as many ranks and in the same stage, 1, 2 or 3.
            async_op: return as soon as the state has been copied, and write in the background.
            timeout: how long a rank waits for the slowest one; by default the process group's time limit.

        Returns:
            A future, done when the checkpoint is committed; with `async_op`, errors are raised by its `result()`.
        """
        return save_engine(
            self,
            save_dir,
            tag,
            client_state or {},
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            async_op=async_op,
            layout=layout,
            timeout=timeout,
        )

    @_with_shards
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from a checkpoint, saved on any number of ranks and in any stage.

        Args:
            tag: the checkpoint's name; None: the latest.
            load_module_strict: raise an error for parameters that are missing or unexpected.
            load_optimizer_states: restore the optimizer.
            load_lr_scheduler_states: restore the lr scheduler.
            load_module_only: restore only the model.

        Returns:
            The checkpoint's path and the client state; (None, {}) if there is no checkpoint in `load_dir`.
        """
        mark("loading")
        path = find_to_load(load_dir, tag)
        if path is None:
            if dist.get_rank() == 0:
                inside = nested(Place(load_dir))
                LOGGER.warning(
                    "nothing loaded: there is no checkpoint in %s yet (no file `latest`)%s", load_dir, inside
                )
            return None, {}
        client_state = load_engine(
            self,
            path,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            lr_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        return os.path.join(load_dir, path.name), client_state  # as it was given, like DeepSpeed's

    @_with_shards
    def save_step(
        self,
        manager: CheckpointManager,
        metrics: Mapping[str, Any] | None = None,
        *,
        client_state: Mapping[str, Any] | None = None,
        force: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run if the manager selects this step; returns whether it does, the same on all ranks.

        Call it after every `step`; the state is collected only for steps that are saved.

        Args:
            manager: decides which steps to save, which checkpoints to keep, and where (docs/manager.md).
            metrics: numbers by name that are stored with the checkpoint; those of the first rank count.
            force: save this step whatever the policy says.
            client_state, exclude_frozen_parameters: as for `save_checkpoint`.
        """
        return save_step(
            self, manager, metrics, client_state or {}, force=force, exclude_frozen=exclude_frozen_parameters
        )

    @_with_shards
    def load_step(
        self,
        manager: CheckpointManager,
        step: Which = "latest",
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[int | None, dict[str, Any]]:
        """Resume from a manager's checkpoint: a step, "latest" or "best". Other arguments as in `load_checkpoint`.

        Returns:
            The step and the client state; (None, {}) if "latest" was asked for and there is no checkpoint yet.
        """
        mark("loading")
        if step == "latest" and manager.latest_step() is None:
            return None, {}
        return load_step(
            self,
            manager,
            step,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            lr_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    # ------------------------------------------------------------------ queries

    @property
    def step_loss(self) -> float | None:
        """This rank's mean loss of the last step; None if the engine did not compute its backward."""
        return None if self.losses.last is None else float(self.losses.last)

    @property
    def overflowed(self) -> bool:
        """Whether the last step was skipped because its gradients overflowed."""
        return self._overflowed

    def reshard(self) -> None:
        """Reshard all parameters, so that each is registered as its shard."""
        reshard(self.module)

    @property
    def between_steps(self) -> bool:
        """Whether there are no accumulated gradients that the optimizer has not used."""
        return not self.losses.pending

    def drop_gradients(self) -> None:
        """Discard the gradients that have been accumulated since the last step, as loading a checkpoint does."""
        self.module.zero_grad(set_to_none=True)
        self.losses.drop()

    @property
    def gradient_scale(self) -> float:
        """The factor by which the gradients accumulated so far are too large."""
        return self.losses.gradient_scale(self.loss_scale.value, self.batch.accumulation)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first. Waits for the device."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.stage

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16, with the loss scaled."""
        return self.config.fp16.enabled

    def train_batch_size(self) -> int:
        """The number of samples of a step, on all ranks."""
        return self.batch.total

    def set_train_batch_size(self, total: int, micro: int | None = None) -> None:
        """Change the number of micro-batches of a step, or their size; only between two steps."""
        micro = self.batch.micro if micro is None else micro
        accumulation, rest = divmod(total, micro * self.dp_world_size)
        if rest or not accumulation:
            raise EngineConfigError(
                f"a batch of {total} samples cannot be divided into micro-batches of {micro} on {self.dp_world_size} "
                "ranks"
            )
        if self.pipeline is not None or self.data_sampler is not None:
            raise EngineError(
                "the batch size cannot change: the pipeline's schedule or the order of the data depends on it"
            )
        if not self.between_steps:
            raise EngineError(
                "the batch size can only change between steps, but gradients have been accumulated already"
            )
        self.batch = Batch(total, micro, accumulation)
        self.micro_steps = self.global_steps * accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """The number of samples of one forward on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of a step."""
        return self.batch.accumulation

    def gradient_clipping(self) -> float:
        """The limit of the gradients' norm; 0 for none."""
        return self.config.gradient_clipping

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        kind = self.ranks.mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    @property
    def global_rank(self) -> int:
        """This rank's number among all."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that see different data."""
        return self.ranks.samples.size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that hold parts of one model."""
        return self.ranks.model_parallel

    def train(self, mode: bool = True) -> Engine:
        """Put the model in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model in evaluation mode."""
        return self.train(False)


def _shared_names(model: nn.Module) -> dict[str, str]:
    """For each parameter with several names, all further names with the first one."""
    first: dict[nn.Parameter, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            shared[name] = first[parameter]
        else:
            first[parameter] = name
    return shared
