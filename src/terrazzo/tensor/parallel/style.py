"""Parallel styles: how one module's parameters are placed, and how its inputs and outputs are converted.

A style places parameters once, when it is applied, and registers two hooks: one makes the input a DTensor with the
placement that the style needs, the other redistributes the output to the requested placement. In between, the module's
own forward runs on DTensors, which compute and communicate as their placements require.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import parameters_of
from terrazzo.errors import ParallelPlanError, UnsupportedModuleError
from terrazzo.layout import Layout, Placement, Replicate, Shard
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.layout.placement import check_placement
from terrazzo.tensor.api import convert_calls, distribute_tensor, replicate_rest
from terrazzo.tensor.dtensor import DTensor

Placements = tuple[Placement, ...]


class ParallelStyle(ShownAsCall, ABC):
    """What `parallelize_module` does with one module. Subclass it for a style of your own.

    `_apply` changes the module in place and returns it. `src_data_rank`, which is set before, is the rank whose values
    the parameters get (None: every rank's own, without communication).
    """

    src_data_rank: int | None = 0
    mesh_dims: int = 1
    """The number of dims of the mesh that the style needs."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...


def as_dtensor(
    value: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...] | None = None
) -> DTensor:
    """`value` itself if it is a DTensor, else a DTensor that has it as this rank's local tensor.

    `shape` is the global shape, if it is known; else all ranks' parts must have the same size.
    """
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape)


def placed(value: DTensor, placements: Placements) -> DTensor:
    """`value` redistributed to these placements; itself if it has them."""
    layout = value._layout
    if Layout.of(layout.mesh, placements, layout.shape) is layout:
        return value
    return value.redistribute(placements=placements)


def place_parameters(
    module: nn.Module, mesh: DeviceMesh, placement_of: Callable[[str], Placement], src_data_rank: int | None
) -> None:
    """Make the parameters of a module and its submodules DTensors, in place; `placement_of` gets a parameter's name.

    A parameter that already has the placement is kept. Buffers are replicated.
    """
    for submodule in module.modules():
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None:
                whole: torch.Tensor = distribute_tensor(
                    parameter, mesh, [placement_of(name)], src_data_rank=src_data_rank
                )
                if whole is not parameter:
                    submodule.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    replicate_rest(module, mesh)


class _Cut(ParallelStyle):
    """What column- and row-wise styles share: one input tensor, one output, and a table of parameter placements.

    The two conversions are methods with PyTorch's names and arguments, because libraries override them: torchao's
    float8 styles gather an input that they have cast before.
    """

    input_layouts: Placements
    output_layouts: Placements
    use_local_output: bool
    _cuts: Mapping[type[nn.Module], tuple[Mapping[str, Placement], Placement]]
    """For each kind of module: the placements of its parameters, and that of its input."""

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        check_placement(input_layouts)
        check_placement(output_layouts)
        self.input_layouts = (input_layouts,)
        self.output_layouts = (output_layouts,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for kind, (parameters, needed) in self._cuts.items():
            if isinstance(module, kind):
                return self._cut(module, device_mesh, parameters, (needed,))
        raise UnsupportedModuleError(
            f"{type(self).__name__} supports {' and '.join(f'nn.{k.__name__}' for k in self._cuts)}, not "
            f"{type(module).__name__}: write a ParallelStyle for it, or place its parameters with distribute_module"
        )

    def _cut(
        self, module: nn.Module, mesh: DeviceMesh, parameters: Mapping[str, Placement], needed: Placements
    ) -> nn.Module:
        def convert_input(mod: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (self._prepare_input_fn(self.input_layouts, needed, mod, inputs, mesh), *inputs[1:])

        def convert_output(mod: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            return self._prepare_output_fn(self.output_layouts, self.use_local_output, mod, output, mesh)

        place_parameters(module, mesh, lambda name: parameters.get(name, Replicate()), self.src_data_rank)
        convert_calls(module, mesh, convert_input, convert_output)
        return module

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        shape = _shape_of_input(mod, inputs[0], input_layouts[0])
        return placed(as_dtensor(inputs[0], device_mesh, input_layouts, shape), desired_input_layouts)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        output = placed(outputs, output_layouts)
        return output.to_local() if use_local_output else output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


def _shape_of_input(module: nn.Module, value: Any, placement: Placement) -> tuple[int, ...] | None:
    """The global shape of a linear layer's input whose features are sharded, maybe unevenly; None for other inputs."""
    if not (isinstance(module, nn.Linear) and isinstance(placement, Shard) and isinstance(value, torch.Tensor)):
        return None
    if not value.ndim or placement.dim not in (-1, value.ndim - 1):
        return None
    return (*value.shape[:-1], module.in_features)


class ColwiseParallel(_Cut):
    """Each rank computes some of the output features of an `nn.Linear`, or some of the columns of an `nn.Embedding`.

    Args:
        input_layouts: The placement of an input that is a plain tensor; replicated by default.
        output_layouts: The placement of the output; by default sharded on its last dim, which needs no communication.
        use_local_output: Return this rank's local tensor instead of a DTensor.

    >>> ColwiseParallel(use_local_output=False)
    ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=False)
    """

    _cuts = {
        nn.Linear: ({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        nn.Embedding: ({"weight": Shard(1)}, Replicate()),
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)


class RowwiseParallel(_Cut):
    """Each rank takes some of the input features of an `nn.Linear`, or some of the rows of an `nn.Embedding`.

    Each rank's result is a term of a sum. `output_layouts=Replicate()` all-reduces them, `Shard(dim)` reduce-scatters.

    Args:
        input_layouts: The placement of an input that is a plain tensor; by default sharded on its last dim. For an
            embedding pass `Replicate()`: the word indices are the same on every rank.
        output_layouts: The placement of the output; replicated by default.
        use_local_output: Return this rank's local tensor instead of a DTensor.
    """

    _cuts = {
        nn.Linear: ({"weight": Shard(1)}, Shard(-1)),
        nn.Embedding: ({"weight": Shard(0)}, Replicate()),
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)


class SequenceParallel(ParallelStyle):
    """Each rank has a part of the sequence and all parameters: for `nn.LayerNorm`, `nn.RMSNorm`, `nn.Dropout`.

    A plain input is this rank's part of the sequence. Parameters get the values of `src_data_rank`, however they were
    initialised.

    Args:
        sequence_dim: Which dim of the input is the sequence.
        use_local_output: Return this rank's local tensor instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: Placements = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharding = self.sequence_sharding

        def convert_input(mod: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            if not isinstance(inputs[0], torch.Tensor):
                raise ParallelPlanError(
                    f"SequenceParallel: {type(mod).__name__} needs a tensor as its first input, got "
                    f"{type(inputs[0]).__name__}"
                )
            return (placed(as_dtensor(inputs[0], mesh, sharding), sharding), *inputs[1:])

        def convert_output(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local() if self.use_local_output else output

        place_parameters(module, device_mesh, lambda name: Replicate(), self.src_data_rank)
        convert_calls(module, device_mesh, convert_input, convert_output)
        return module

    def __repr__(self) -> str:
        (sharding,) = self.sequence_sharding
        assert isinstance(sharding, Shard)
        return f"SequenceParallel(sequence_dim={sharding.dim}, use_local_output={self.use_local_output})"
