"""Models cut into stages with `torch.distributed.pipelining`, each trained by different ranks.

PyTorch's schedule decides when a stage runs forward and backward of which micro-batch, and sends activations and
gradients between the stages. One run of the schedule is one step; this module does what is around it:

    before    sets when gradients are reduced and parameters freed, as the ZeRO stage requires
    loss      scales it, and divides it by the number of micro-batches, where the last stage computes it
    after     reduces gradients that have only been accumulated, reshards parameters, and sends the loss to every rank

The modules of a stage have the names that they have in the whole model, so together the stages save the whole model's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo._torch.dispatching import tree_leaves
from terrazzo.comm import Axis, collectives
from terrazzo.engine.config import Batch
from terrazzo.engine.gathering import gather_over
from terrazzo.engine.placing import reshard
from terrazzo.engine.tied import TiedParameters
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.fsdp import register_fsdp_pipeline_stage
from terrazzo.fsdp.module import expect_backward

LossFunction = Callable[..., Tensor]
ScheduleFactory = Callable[..., Any]


class Stage(Protocol):
    """A `PipelineStage`, or the result of `build_stage`."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    group: Any


class StageModules(nn.Module):
    """The stages that one rank holds, as one module; the names of their parts do not depend on the stage."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """The modules of all stages, without prefixes for the stages."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def modules(self, remove_duplicate: bool = True) -> Any:
        """`named_modules` without the names."""
        for _, module in self.named_modules(remove_duplicate=remove_duplicate):
            yield module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The stages' state dicts as one."""
        return {name: value for part in self.parts for name, value in part.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into each stage the entries that it has."""
        for part in self.parts:
            own = {name: value for name, value in state_dict.items() if name in part.state_dict()}
            part.load_state_dict(own, strict=strict, assign=assign)


class Pipeline:
    """The stages that this rank trains, and their schedule.

    Attributes:
        module: the stage, or the stages as one module.
        parts: the modules of the stages.
        schedule: PyTorch's schedule.
        elsewhere: names in the state dicts of other ranks' stages.
        tied: parameters of which other stages have copies.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        make: ScheduleFactory,
        loss_fn: LossFunction,
        axis: Axis,
        tied: Mapping[str, str],
    ) -> None:
        self._held = _check_stages(stages, axis)
        self.axis = axis
        self.parts = [stage.submod for stage in stages]
        self.module = self.parts[0] if len(self.parts) == 1 else StageModules(self.parts)
        self.elsewhere = _names_elsewhere(self.module, axis)
        self.tied = TiedParameters(self.module, tied, axis)
        self.tied.make_equal(self.module)
        self._stages, self._make, self._loss_fn = list(stages), make, loss_fn
        self._first = any(stage.stage_index == 0 for stage in stages)
        self._last = any(stage.stage_index == stage.num_stages - 1 for stage in stages)
        self._losses: list[Tensor] = []  # of each micro-batch, on the rank of the last stage
        self._factor = 1.0  # of the loss in backward
        self.schedule: Any = None
        # A schedule infers at its first batch which shapes stages exchange; such modules get a new one for each.
        self._dynamic = any(getattr(part, "dynamic_shape", False) for part in self.parts)
        if self._dynamic and axis.size > 1 and any(hasattr(stage, "inputs_meta") for stage in stages):
            raise EngineConfigError(
                f"dynamic_shape needs PyTorch 2.13: the stages of {torch.__version__} keep the shapes of their first "
                "batch. Update it, or pad the inputs to one shape and leave dynamic_shape out"
            )
        self._ran: tuple[str, list[torch.Size]] | None = None  # the schedule's last run, and the shapes of its inputs
        self._splits = False  # whether it computes the gradients of inputs and of parameters apart

    def prepare(self, batch: Batch) -> None:
        """Create the schedule, after the stages have been sharded."""
        self._batch = batch
        again = self.schedule is not None
        stages: Any = self._stages if len(self._stages) > 1 else self._stages[0]
        try:
            # scale_grads=False: the loss is divided here; PyTorch would divide gradients that are not reduced yet.
            self.schedule = self._make(
                stages, n_microbatches=batch.accumulation, loss_fn=self._scaled_loss, scale_grads=False
            )
        except (TypeError, ValueError, AttributeError) as error:
            count = f"{len(self._stages)} stage{'s' if len(self._stages) > 1 else ''}"
            raise EngineConfigError(
                f"pipeline={_name_of(self._make)} could not create a schedule of {count} and {batch.accumulation} "
                f"micro-batches (gradient_accumulation_steps): {error}"
            ) from error
        self._splits = _splits_backward(self.schedule)
        if self._splits and not again:
            for stage in self._stages:
                register_fsdp_pipeline_stage(stage)

    def _scaled_loss(self, output: Any, target: Any, **kwargs: Any) -> Tensor:
        loss = self._loss_fn(output, target, **kwargs)
        self._losses.append(loss.detach().float())
        return loss.float() * self._factor

    # ------------------------------------------------------------------ a step

    def train(
        self, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any], *, scale: float, zero_stage: int
    ) -> Tensor:
        """Forward and backward of all micro-batches, and the reduction of gradients; returns this rank's loss."""
        self._check_samples(args, target)
        # Reduced after every micro-batch, or once: in ZeRO stages 0 and 1, or by a schedule that splits backward.
        at_once = zero_stage >= 2 and not self._splits
        for part in self.parts:
            expect_backward(part, reduces=at_once, reshards=zero_stage == 3)
        self._factor = scale / self._batch.accumulation
        self._run("step", args, target, kwargs)
        for part in self.parts:
            if not at_once and not self._splits:
                part.reduce_gradients()  # type: ignore[operator]
            reshard(part)
        return self._loss()

    @torch.no_grad()
    def evaluate(self, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Forward only, in evaluation mode; returns this rank's loss."""
        if self._splits:
            _refuse_forward_alone(self.schedule, self._held)
        self._check_samples(args, target)
        modes = [(module, module.training) for part in self.parts for module in part.modules()]
        try:
            for part in self.parts:
                part.eval()
            self._run("eval", args, target, kwargs)
        finally:
            for module, training in modes:
                module.training = training
        return self._loss()

    def _run(self, name: str, args: Sequence[Any], target: Any, kwargs: Mapping[str, Any]) -> None:
        run = name, [leaf.shape for leaf in tree_leaves(list(args)) if isinstance(leaf, Tensor)]
        if self._dynamic:
            self.prepare(self._batch)
        elif self.axis.size > 1 and self._ran is not None and self._ran[0] == name and self._ran != run:
            raise EngineError(
                f"the inputs have the shapes {[*map(tuple, run[1])]} and had {[*map(tuple, self._ran[1])]} before: "
                "stages exchange tensors of the first batch's shapes. Pad the inputs to one shape, or set "
                "dynamic_shape = True on the stages' modules before initialize"
            )
        self._ran = run
        self._losses.clear()
        if self._last:
            kwargs = {**kwargs, "target": target}
        getattr(self.schedule, name)(*(args if self._first else ()), **kwargs, return_outputs=False)

    def _check_samples(self, args: Sequence[Any], target: Any) -> None:
        expected = self._batch.micro * self._batch.accumulation
        for what, value in (("inputs", list(args)), ("target", target)):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim]
            if tensors and tensors[0].shape[0] != expected:
                raise EngineError(
                    f"the {what} have {tensors[0].shape[0]} samples, but a step of this rank takes {expected}: "
                    f"{self._batch.accumulation} micro-batches of {self._batch.micro}"
                )
        if (self._first and not args) or (self._last and target is None):
            raise EngineError("the first stage needs inputs and the last one a target: pass both on every rank")

    def _loss(self) -> Tensor:
        # Only the last ones: PyTorch computes one more loss when it first infers the shapes that stages exchange.
        found = self._losses[-self._batch.accumulation :]
        return torch.stack(found).mean() if found else torch.zeros((), device=self.axis.device_type)

    # ------------------------------------------------------------------ over all stages

    def total(self, value: Tensor) -> Tensor:
        """The sum over the stages of this pipeline."""
        return collectives.all_reduce(value, self.axis)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all stages' gradients, from that of this rank's."""
        square = norm.to(self.axis.device_type, torch.float64) ** 2
        return self.total(square).sqrt()


def as_stages(model: Stage | Sequence[Stage]) -> list[Stage]:
    """The stages that a user passed, one or several."""
    given = list(model) if isinstance(model, Sequence) else [model]
    for stage in given:
        if not all(hasattr(stage, name) for name in ("submod", "stage_index", "num_stages")):
            raise EngineConfigError(
                f"model must be an nn.Module, a PipelineStage or a list of PipelineStages, not {type(stage).__name__}"
            )
    if not given:
        raise EngineConfigError("model is an empty list of stages")
    return given


# ------------------------------------------------------------------ checks


def _check_stages(stages: Sequence[Stage], axis: Axis) -> list[list[int]]:
    """The stage numbers of every rank; an error unless each stage is held once."""
    for stage in stages:
        ranks_of_stage = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        if tuple(ranks_of_stage) != axis.ranks:
            raise EngineConfigError(
                f"stage {stage.stage_index} communicates with ranks {ranks_of_stage}, but the mesh has the pipeline on "
                f"ranks {list(axis.ranks)}: create the stage with group=mesh.get_group({axis.name!r})"
            )
    ranks = gather_over(axis, [[stage.stage_index, stage.num_stages] for stage in stages])
    indices = sorted(index for rank in ranks for index, _ in rank)
    counts = {count for rank in ranks for _, count in rank}
    if len(counts) > 1 or indices != list(range(counts.copy().pop())):
        raise EngineConfigError(
            f"ranks {list(axis.ranks)} hold the stages {[[index for index, _ in rank] for rank in ranks]} of "
            f"{sorted(counts)}; together they must hold each stage exactly once"
        )
    return [sorted(index for index, _ in rank) for rank in ranks]


def _names_elsewhere(module: nn.Module, axis: Axis) -> frozenset[str]:
    """The names of other ranks' tensors; a parameter in two stages raises an error."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    found = gather_over(axis, [list(module.state_dict()), parameters])
    holders: dict[str, list[int]] = {}
    for rank, (_, names) in zip(axis.ranks, found, strict=True):
        for name in names:
            holders.setdefault(name, []).append(rank)
    twice = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
    if twice:
        said = ", ".join(f"{name} on ranks {ranks}" for name, ranks in list(twice.items())[:4])
        raise EngineConfigError(
            f"{len(twice)} parameters are in several stages: {said}. The parts of a stage must have the names that "
            "they have in the whole model: put nn.Identity in the places of layers that are on other stages, or keep "
            "layers in an nn.ModuleDict by number. Give a parameter that stages share another name in each, and pass "
            "the names as tied="
        )
    return frozenset(name for index, (names, _) in enumerate(found) if index != axis.index for name in names)


def _splits_backward(schedule: Any) -> bool:
    """Whether the schedule computes gradients of inputs and of parameters separately."""
    orders = (getattr(schedule, "pipeline_order", None) or {}).values()
    kinds = {getattr(action.computation_type, "name", "") for order in orders for action in order if action is not None}
    return bool(kinds & {"BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"})


def _refuse_forward_alone(schedule: Any, held: Sequence[Sequence[int]]) -> None:
    """Raise for such a schedule: between stages on one rank PyTorch passes on gradients also where there are none."""
    for stages in held:
        if any(index + 1 in stages for index in stages):
            raise EngineError(
                f"PyTorch's {type(schedule).__name__} cannot run forward only if neighbouring stages, here "
                f"{list(stages)}, are on one rank: evaluate with an engine with another schedule, such as "
                "ScheduleInterleaved1F1B, that loads this one's checkpoint"
            )


def _name_of(make: Any) -> str:
    return getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", None) or repr(make)
