"""Styles that only convert the inputs and outputs of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.errors import ParallelPlanError
from terrazzo.layout import Placement
from terrazzo.layout.placement import check_placement
from terrazzo.tensor.parallel.style import ParallelStyle, as_dtensor, placed

Layouts: TypeAlias = Placement | tuple[Placement | None, ...]


def _per_value(layouts: Layouts) -> tuple[Placement | None, ...]:
    values = tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)
    for value in values:
        if value is not None:
            check_placement(value)
    return values


def _same_length(given: Any, desired: Any, what: str) -> None:
    if len(given) != len(desired):
        raise ParallelPlanError(
            f"{what} and desired_{what} should have same length! Got {len(given)} and {len(desired)}"
        )


def _check_tensor(value: Any, given: Placement | None, what: str) -> Any:
    if given is not None and not isinstance(value, torch.Tensor):
        raise ParallelPlanError(
            f"{what} has the placement {given} but is a {type(value).__name__}, not a tensor: give None as its layout"
        )
    return value


def _convert(value: Any, mesh: DeviceMesh, given: Placement | None, desired: Placement | None, local: bool) -> Any:
    """`value`, with placement `given`, redistributed to `desired`; unchanged if `given` is None."""
    if given is None:
        return value
    tensor = as_dtensor(value, mesh, (given,))
    if desired is not None:
        tensor = placed(tensor, (desired,))
    return tensor.to_local() if local else tensor


class PrepareModuleInput(ParallelStyle):
    """Convert a module's inputs to DTensors, and redistribute them to the placements that it needs.

    An input that is already a DTensor keeps its own placement until it is redistributed to the desired one.

    Args:
        input_layouts: The placement of each positional input, None for inputs that are left alone; a single placement
            for a single input.
        desired_input_layouts: The placement that the module gets for each of them, in the same order.
        input_kwarg_layouts: The same as input_layouts for keyword inputs, by name.
        desired_input_kwarg_layouts: The same as desired_input_layouts for keyword inputs, by name.
        use_local_output: Pass the module this rank's local tensors instead of DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = None if input_layouts is None else _per_value(input_layouts)
        self.desired_input_layouts = None if desired_input_layouts is None else _per_value(desired_input_layouts)
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise ParallelPlanError(
                    "input_layouts needs desired_input_layouts: the placements that the module's forward needs"
                )
            _same_length(self.input_layouts, self.desired_input_layouts, "input_layouts")
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        for value in (*self.input_kwarg_layouts.values(), *self.desired_input_kwarg_layouts.values()):
            if value is not None:
                check_placement(value)
        if self.with_kwargs:
            _same_length(self.input_kwarg_layouts, self.desired_input_kwarg_layouts, "input_kwarg_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def convert(_module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            named = self._named(kwargs, device_mesh) if self.with_kwargs else kwargs
            return self._positional(inputs, device_mesh), named

        module.register_forward_pre_hook(convert, with_kwargs=True)
        return module

    def _positional(self, inputs: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        given, desired = self.input_layouts, self.desired_input_layouts
        if given is None or desired is None:
            return inputs
        if len(inputs) != len(given):
            raise ParallelPlanError(
                f"module inputs and input_layouts should have same length! The module got {len(inputs)} positional "
                f"inputs, but input_layouts has {len(given)}"
            )
        return tuple(
            self._prepare_input_arg(_check_tensor(x, g, f"input {i}"), mesh, g, d)
            for i, (x, g, d) in enumerate(zip(inputs, given, desired, strict=True))
        )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        """One input, converted. It has PyTorch's name and arguments because libraries override it."""
        return _convert(input, mesh, input_layout, desired_layout, self.use_local_output)

    def _named(self, kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        given, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        result = {}
        for name, x in kwargs.items():
            at = given.get(name)
            result[name] = self._prepare_input_arg(_check_tensor(x, at, f"input {name!r}"), mesh, at, desired.get(name))
        return result

    def __repr__(self) -> str:
        return f"PrepareModuleInput({self._described()}, use_local_output={self.use_local_output})"

    def _described(self) -> str:
        names = ("input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class PrepareModuleOutput(ParallelStyle):
    """Convert a module's outputs to DTensors, and redistribute them to the desired placements.

    Args:
        output_layouts: The placement of each output, None for outputs that are left alone; a single placement for a
            single output.
        desired_output_layouts: The desired placement of each of them, in the same order.
        use_local_output: Return this rank's local tensors instead of DTensors.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _per_value(output_layouts)
        self.desired_output_layouts = _per_value(desired_output_layouts)
        self.use_local_output = use_local_output
        _same_length(self.output_layouts, self.desired_output_layouts, "output_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _module, _inputs, outputs: self._convert_outputs(outputs, device_mesh))
        return module

    def _convert_outputs(self, outputs: Any, mesh: DeviceMesh) -> Any:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(outputs) != len(self.output_layouts):
            raise ParallelPlanError(
                f"module outputs and output_layouts should have same length! The module returned {len(outputs)} "
                f"outputs, but output_layouts has {len(self.output_layouts)}"
            )
        converted = tuple(
            _convert(_check_tensor(x, g, f"output {i}"), mesh, g, d, self.use_local_output)
            for i, (x, g, d) in enumerate(zip(outputs, self.output_layouts, self.desired_output_layouts, strict=True))
        )
        return converted[0] if len(converted) == 1 else converted

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({self._described()}, use_local_output={self.use_local_output})"

    def _described(self) -> str:
        return f"output_layouts={self.output_layouts}, desired_output_layouts={self.desired_output_layouts}"


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; `use_local_input` is the first's `use_local_output`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        inputs, outputs = self.prepare_module_input, self.prepare_module_output
        return (
            f"PrepareModuleInputOutput({inputs._described()}, use_local_input={inputs.use_local_output}, "
            f"{outputs._described()}, use_local_output={outputs.use_local_output})"
        )
