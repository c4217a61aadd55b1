"""Hooks on forward and backward of sharded modules, which report events to the root and cast inputs and outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo._torch.autograd import forward_mode_active, gradient_hooks, in_backward, watch_gradient, with_graphs
from terrazzo._torch.compiling import stay_eager
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.plan.course import Spot
from terrazzo.fsdp.plan.state import Event, Phase
from terrazzo.fsdp.run.root import Root, root_of
from terrazzo.fsdp.run.unit import Unit
from terrazzo.fsdp.tree import Copies, map_tensors


def before_forward(group: Group, module: nn.Module, args: Any, kwargs: Any, copies: Copies) -> tuple[Any, Any]:
    """Unshard the parameters; returns the module's inputs, cast and watched. `copies` notes containers in them that
    were copied."""
    root: Root = group.root if group.root is not None else root_of(group)
    unit: Unit = group.unit
    inside = in_backward()
    if root.state.phase[unit.index] is Phase.BACKWARD:
        if inside:  # activation checkpointing computes forward again
            root.advance((Event.RECOMPUTE, unit.index))
            return _cast_inputs(group, args, kwargs, copies)
        root.recover()
    position = root.positions[module]
    outermost = root.state.outermost < 0
    if outermost:
        root.begin_forward(position)
        if root.streams is not None:
            device = root.device
            args, kwargs = map_tensors((args, kwargs), lambda t: t.to(device, non_blocking=True), copies)
    first = root.state.phase[unit.index] is Phase.IDLE and bool(unit.params)
    spot = root.enter(unit, outermost) if first and not inside else None
    root.advance((Event.ENTER, position, inside))
    args, kwargs = _cast_inputs(group, args, kwargs, copies)
    if first and torch.is_grad_enabled() and not forward_mode_active():
        # A view, whose gradient is complete when the backward of everything in this forward has run.
        watched = partial(_watched, partial(_after_backward, group, spot))
        args = map_tensors(args, watched, copies)
        if kwargs:
            kwargs = map_tensors(kwargs, watched, copies)
    return args, kwargs


def after_forward(group: Group, module: nn.Module, outputs: Any) -> Any:
    """Register hooks for backward, and reshard if that is set; returns the module's outputs, cast and watched."""
    root: Root = group.root
    unit: Unit = group.unit
    state = root.state
    forward, recomputing = state.phase[unit.index] is not Phase.BACKWARD, in_backward()
    announced = forward and torch.is_grad_enabled()
    course = root.course if announced and not recomputing else None
    spot = None if course is None else (course, len(course.events))
    # Backward through forward-mode derivatives, which no hook can tell from others, needs the parameters to its end.
    forward_mode = announced and forward_mode_active()
    hook = partial(_before_backward, group, state.ended, spot, stays=forward_mode) if announced else None
    outputs, found, watched = _leave(unit, group.settings.precision.output_dtype, hook, outputs)
    if not forward:
        return outputs
    returns = announced and not recomputing and (watched or root.executor.spec.units[unit.index].trainable)
    if course is not None and returns:
        course.left_by(unit.index, state.ended)
    # If no output can have a hook, backward may run without notice, and needs the parameters.
    keep = announced and (recomputing or not found or forward_mode)
    if forward_mode:
        _watch_parameters(group)
    position = root.positions[module]
    root.advance((Event.LEAVE, position, returns, keep))
    if state.outermost == position:
        root.end_forward()
    return outputs


def forward_failed(group: Group, module: nn.Module) -> None:
    """Forward raised."""
    root: Root | None = group.root
    if root is None:
        return
    position = root.positions[module]
    if root.state.phase[group.unit.index] is Phase.FORWARD:
        root.advance((Event.LEAVE, position, False, False))
    if root.state.outermost in (position, -1):
        root.end_forward(failed=True)


def _leave(unit: Unit, dtype: torch.dtype | None, hook: Any, outputs: Any) -> tuple[Any, bool, bool]:
    """The outputs, cast and with hooks; whether there are tensors among them, and whether any requires a gradient."""
    found = watched = False

    def leave(tensor: Tensor) -> Tensor:
        nonlocal found, watched
        found = True
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if unit.lends(tensor):  # a returned parameter, or a view of one, would lose its memory
            tensor = tensor.clone()
        if hook is None:
            return tensor
        if not with_graphs(tensor):
            return tensor
        watched = True
        return _announced(hook, tensor)

    return map_tensors(outputs, leave), found, watched


def _cast_inputs(group: Group, args: Any, kwargs: Any, copies: Copies) -> tuple[Any, Any]:
    precision = group.settings.precision
    dtype = precision.param_dtype
    if dtype is None or not precision.cast_forward_inputs:
        return args, kwargs

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(args, cast, copies), map_tensors(kwargs, cast, copies)


def _watched(hook: Any, tensor: Tensor) -> Tensor:
    if not with_graphs(tensor):
        return tensor
    alias = tensor.view_as(tensor)
    _watch(alias, hook)
    return alias


def _announced(hook: Any, tensor: Tensor) -> Tensor:
    if any(each.is_leaf for each in with_graphs(tensor)):  # a returned parameter, on which hooks would accumulate
        tensor = tensor.view_as(tensor)
    _watch(tensor, hook)
    return tensor


def _watch(tensor: Tensor, hook: Any) -> None:
    for each in with_graphs(tensor):
        watch_gradient(each, hook)


def _before_backward(
    group: Group, before: tuple[int, ...], spot: Spot | None, grad: Tensor, *, stays: bool = False
) -> None:
    """Called when backward reaches an output of the modules; `before` are the units that ran before, latest first. With
    `stays` it leaves them at its end only."""
    root: Root = group.root
    index: int = group.unit.index
    records_graph = _records_graph(grad)
    if records_graph:
        _watch(grad, partial(_after_double_backward, group))
    backward = root.backward if root.backward is not None else root.begin_backward()
    backward.come_to(spot, records_graph)
    backward.reach(index, before)
    if stays:
        backward.staying.add(index)


def _watch_parameters(group: Group) -> None:
    """Have the unsharded parameters notice a backward that comes to them by tangents alone."""
    for param in group.unit.params:
        known = gradient_hooks(param.unsharded_local) or {}
        if param.requires_grad and not any(getattr(hook, "func", None) is _at_parameter for hook in known.values()):
            param.unsharded_local.register_hook(partial(_at_parameter, group))


def _at_parameter(group: Group, grad: Tensor) -> None:
    """Called when backward reaches an unsharded parameter of which forward-mode derivatives were computed once."""
    if group.root.backward is None or group.unit.index not in group.root.backward.reached:
        _before_backward(group, (), None, grad, stays=True)


def _after_backward(group: Group, spot: Spot | None, grad: Tensor) -> None:
    """Called when backward leaves the modules through an input."""
    root: Root = group.root
    unit: Unit = group.unit
    if _records_graph(grad):
        _watch(grad, partial(_before_double_backward, group))
    backward = root.backward if root.backward is not None else root.begin_backward()
    backward.come_to(spot, False)
    backward.leave(unit)


def _records_graph(grad: Tensor) -> bool:
    """Whether this backward records a graph, through which a later one runs.

    That one enters the modules where this one leaves them, and leaves them where this one enters.
    """
    return torch.is_grad_enabled() and bool(with_graphs(grad))


def _before_double_backward(group: Group, grad: Tensor) -> None:
    """Backward through a backward enters the modules where that one left them."""
    _before_backward(group, (), None, grad, stays=True)


def _after_double_backward(group: Group, grad: Tensor) -> None:
    """Backward through a backward leaves the modules; it may still run through their forward, so nothing is freed."""
    if _records_graph(grad):
        _watch(grad, partial(_before_double_backward, group))


for _hook in (before_forward, after_forward):
    stay_eager(_hook)  # torch.compile breaks the graph here; no cost for eager code
