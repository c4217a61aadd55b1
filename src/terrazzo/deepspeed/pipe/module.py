"""`PipelineModule`: a sequence of layers, of which each rank holds those of its stage.

A layer has the name that it would have in an `nn.Sequential` of all layers: its number. So the stages' state dicts
together are the state dict of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from terrazzo.comm import axis_of
from terrazzo.deepspeed.accelerator import get_accelerator
from terrazzo.deepspeed.checkpointing import checkpoint
from terrazzo.deepspeed.comm import init_distributed
from terrazzo.deepspeed.pipe.partition import balanced, uniform
from terrazzo.deepspeed.pipe.topology import ProcessTopology
from terrazzo.engine.gathering import gather_over
from terrazzo.errors import EngineConfigError
from terrazzo.layout.drawing import ShownAsCall

if TYPE_CHECKING:  # not imported otherwise, because it imports Dynamo
    from torch.distributed.pipelining import PipelineStage


class LayerSpec(ShownAsCall):
    """A description of a layer, which is created on the ranks that need it.

    >>> LayerSpec(nn.Linear, 2, 3, bias=False).build()
    Linear(in_features=2, out_features=3, bias=False)
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise EngineConfigError(f"LayerSpec needs a class of modules, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is at several places, with the same weights.

    Args:
        key: The same for all places.
        forward_fn: Called with the module and the input, instead of the module's forward.
        tied_weight_attr: Which of its parameters stages share: dotted names, or properties that return them.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(nn.Module):
    """This rank's stage of a sequence of layers.

    Args:
        layers: Modules, functions, `LayerSpec`s; each gets what the one before returned.
        num_stages: The number of stages; or pass `topology`.
        topology: Ranks along the axes `pipe` and `data`.
        loss_fn: The loss of the last layer's output and the labels; None: the output is the loss.
        seed_layers: Seed with `base_seed` plus the layer's number before each layer is created.
        seed_fn: The function that seeds; None: `torch.manual_seed`.
        base_seed: See `seed_layers`.
        partition_method: `parameters`, `uniform`, or `type:` and a pattern of class names that are counted.
        activation_checkpoint_interval: How many layers to recompute together in backward; 0: none.
        activation_checkpoint_func: The function that recomputes them.
        checkpointable_layers: Class names of layers to recompute; None: those with parameters.
        dynamic_shape: Batches may differ in shape; each then costs one more forward and backward of a micro-batch.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        init_distributed()
        self.loss_fn = loss_fn
        self.dynamic_shape = dynamic_shape
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._checkpoint, self._checkpointable = activation_checkpoint_func, checkpointable_layers
        self.num_stages, copies = _sizes(num_stages, topology)
        self.mesh = init_device_mesh(
            get_accelerator().device_name(), (self.num_stages, copies), mesh_dim_names=("pp", "dp")
        )
        self.stage_id = self.mesh.get_local_rank("pp")
        specs = list(layers)
        self.parts = _bounds(specs, self.num_stages, partition_method)
        self.tied: dict[str, str] = {}  # further names of parameters of tied layers -> the first name
        self._functions: list[Callable[..., Any]] = []
        seed = (seed_fn or torch.manual_seed) if seed_layers else None
        self._build(specs, None if seed is None else lambda number: seed(base_seed + number))
        self.to(get_accelerator().current_device_name())
        for parameter in self.parameters():
            parameter.ds_stage_mesh = self.mesh["dp"]  # type: ignore[attr-defined]  # for zero.GatheredParameters

    def _build(self, specs: list[Any], seed: Callable[[int], Any] | None) -> None:
        start, stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]
        made: dict[str, nn.Module] = {}
        for number in range(start, stop):
            if seed is not None:
                seed(number)
            spec = specs[number]
            if isinstance(spec, TiedLayerSpec):
                layer: Any = made.setdefault(spec.key, spec.build()) if spec.key not in made else made[spec.key]
            else:
                layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(layer, nn.Module):
                self.add_module(str(number), layer)
            forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
            self._functions.append(layer if forward_fn is None else partial(forward_fn, layer))
        self._tie(specs)

    def _tie(self, specs: list[Any]) -> None:
        """Find parameters of tied layers that are on several stages: each stage's copy is at its first place there."""
        places: dict[str, dict[int, int]] = {}  # of each key: the first layer on each stage that has it
        for number, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                stage = next(s for s in range(self.num_stages) if self.parts[s] <= number < self.parts[s + 1])
                places.setdefault(spec.key, {}).setdefault(stage, number)
        pairs = []
        for first, *others in (list(numbers.values()) for numbers in places.values()):
            for number in others:
                here, there = specs[number].tied_weight_attr, specs[first].tied_weight_attr
                if len(here) != len(there):
                    raise EngineConfigError(
                        f"layers {first} and {number} have the key {specs[first].key!r}, but one ties {there} and the "
                        f"other {here}: tied_weight_attr must have as many names for both"
                    )
                pairs += [((number, name), (first, same)) for name, same in zip(here, there, strict=True)]
        names = self._names_of(dict.fromkeys(chain.from_iterable(pairs))) if pairs else {}
        self.tied = {names[copy]: names[first] for copy, first in pairs}

    def _names_of(self, tied: Iterable[tuple[int, str]]) -> dict[tuple[int, str], str]:
        """The parameters that attributes of layers are, by the parameters' own names; the same on all stages."""
        start, stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]
        own = {id(parameter): name for name, parameter in self.named_parameters()}
        found, faults = [], []
        for number, attribute in tied:
            if start <= number < stop:
                layer = self.get_submodule(str(number))
                try:
                    found.append((number, attribute, own[id(attrgetter(attribute)(layer))]))
                except (AttributeError, KeyError) as error:
                    what = "has no such attribute" if isinstance(error, AttributeError) else "it is no parameter there"
                    faults.append(f"tied_weight_attr {attribute!r} of layer {number}, {type(layer).__name__}: {what}")
        gathered = gather_over(axis_of(self.mesh, 0), [found, faults])  # a fault of one stage is an error on all
        if wrong := [fault for _, others in gathered for fault in others]:
            raise EngineConfigError(
                f"{'; '.join(wrong)}; it must name a parameter of the layer, or a property that returns one"
            )
        return {(number, attribute): name for names, _ in gathered for number, attribute, name in names}

    # ------------------------------------------------------------------ as a stage

    def as_stage(self, config: Mapping[str, Any]) -> PipelineStage:
        """The stage to pass to `terrazzo.engine.initialize`."""
        from torch.distributed.pipelining import PipelineStage

        interval = (config.get("pipeline") or {}).get("activation_checkpoint_interval", 0)
        if interval > 0:
            self.activation_checkpoint_interval = interval
        if self.parts[self.stage_id] == self.parts[self.stage_id + 1]:
            raise EngineConfigError(f"stage {self.stage_id} of {self.num_stages} has no layers: {self.parts}")
        device = torch.device(get_accelerator().current_device_name())
        return PipelineStage(self, self.stage_id, self.num_stages, device, group=self.mesh.get_group("pp"))

    def schedule(self, stage: Any, n_microbatches: int, **options: Any) -> Any:
        """PyTorch's schedule of the stages."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        kind = Schedule1F1B if n_microbatches >= self.num_stages else ScheduleGPipe
        return kind(stage, n_microbatches=n_microbatches, **options)

    def loss(self, outputs: Any, target: Any) -> Tensor:
        """The loss of a micro-batch."""
        return outputs if self.loss_fn is None else self.loss_fn(outputs, target)

    def forward(self, *inputs: Any) -> Any:
        """Run the layers one after the other; a tuple is passed on as it is."""
        x = inputs[0] if len(inputs) == 1 else inputs
        count = len(self._functions)
        step = self.activation_checkpoint_interval or count
        for start in range(0, count, step):
            functions = self._functions[start : start + step]
            if self.activation_checkpoint_interval and self.training and self._worth_it(functions):
                x = self._checkpoint(partial(_run, functions), *(x if isinstance(x, tuple) else (x,)))
            else:
                x = _run(functions, *(x if isinstance(x, tuple) else (x,)))
        return x

    def _worth_it(self, functions: list[Callable[..., Any]]) -> bool:
        modules = [f for f in functions if isinstance(f, nn.Module)]
        if self._checkpointable is not None:
            return all(type(m).__name__ in self._checkpointable for m in modules)
        return any(True for m in modules for _ in m.parameters())


def _run(functions: list[Callable[..., Any]], *inputs: Any) -> Any:
    x: Any = inputs[0] if len(inputs) == 1 else inputs
    for function in functions:
        x = function(x)
    return x


def _sizes(num_stages: int | None, topology: ProcessTopology | None) -> tuple[int, int]:
    world = dist.get_world_size()
    if topology is not None:
        if topology.get_axis_names() != ["pipe", "data"]:
            raise EngineConfigError(f"a topology must have the axes pipe and data, in this order, not {topology.axes}")
        num_stages = topology.get_dim("pipe")
    if num_stages is None:
        raise EngineConfigError("PipelineModule needs num_stages or topology")
    if world % num_stages:
        raise EngineConfigError(f"{world} ranks cannot be divided into {num_stages} stages")
    return num_stages, world // num_stages


def _bounds(specs: list[Any], stages: int, method: str) -> list[int]:
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return uniform(len(specs), stages)
    if kind.lower() == "parameters":
        return balanced([_size(spec) for spec in specs], stages)
    if kind.lower() == "type" and pattern:
        named = re.compile(pattern, re.IGNORECASE)
        counted = [int(bool(named.search(_type_name(spec)))) for spec in specs]
        if not any(counted):
            raise EngineConfigError(f"partition_method {method!r} matches no layer")
        return balanced(counted, stages)
    raise EngineConfigError(f"partition_method must be parameters, uniform or type:PATTERN, not {method!r}")


def _size(spec: Any) -> int:
    module = spec.build() if isinstance(spec, LayerSpec) else spec
    return sum(p.numel() for p in module.parameters() if p.requires_grad) if isinstance(module, nn.Module) else 0


def _type_name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "")


__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
