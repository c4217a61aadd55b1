"""The initial state of an optimizer for a parameter that it has not stepped yet.

Optimizers create their state in the first `step`. To load into an optimizer that has not stepped, or to save one with
an entry for every parameter, the state must be known before. PyTorch's state-dict functions step the optimizer itself,
with zero gradients and learning rate, which changes it: Adam's step counter becomes 1, NAdam's momentum product is
multiplied, Rprop's step size becomes 0. Here another optimizer of the same class, with a copy of one parameter, is
stepped instead; the user's parameters, gradients, state and counters do not change.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from terrazzo._torch.modules import state_maker_of
from terrazzo.errors import CheckpointError


@torch.no_grad()
def initial_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """The initial state of `optimizer` for `param` with the hyperparameters of `group`; {} if it has none.

    It is exact for PyTorch's optimizers. If the state is created only in a step (SGD's momentum, optimizers of other
    libraries), the copy takes a step with zero gradient and learning rate, and its "step" is set to zero; for SGD that
    equals no state unless `dampening` is used.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.AdamW([weight])
    >>> initial_state(adam, weight, adam.param_groups[0])["step"]
    tensor(0.)
    >>> len(adam.state)
    0
    """
    optimizer = _behind(optimizer)
    if not param.requires_grad or _needs_closure(optimizer):
        return {}
    stand_in = param.detach().clone()
    stand_in.grad = torch.zeros_like(stand_in)
    double = _double(optimizer, {**group, "params": [stand_in]})
    try:
        _create_without_stepping(double)
        if not double.state[stand_in]:
            _step(double)
            _rewind(double.state[stand_in])
    except Exception as error:
        raise CheckpointError(
            f"{type(optimizer).__name__} could not make its state for a parameter of shape {tuple(param.shape)} from a "
            "zero gradient: take one optimizer step before you get or set its state dict"
        ) from error
    return dict(double.state[stand_in])


def complete_state(optimizer: torch.optim.Optimizer, by_index: dict[str, Any] | None = None) -> dict[str, Any]:
    """`optimizer.state_dict()` (or `by_index`, an earlier one) with entries for parameters that were not stepped."""
    by_index = optimizer.state_dict() if by_index is None else by_index
    if not keyed_by_index(by_index):
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() is not of the form of torch.optim's ('state' by the parameters' "
            "numbers, and 'param_groups'): use the optimizer's own state dict, or the optimizers that it contains"
        )
    state = dict(by_index["state"])
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    for index, (param, group) in enumerate(params):
        if not state.get(index) and (initial := initial_state(optimizer, param, group)):
            state[index] = initial
    return {**by_index, "state": state}


def keyed_by_index(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state dict has torch.optim's form. Containers of several optimizers have other forms."""
    return isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)


def _behind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, without the wrappers of Accelerate and Lightning."""
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            if inner.state is optimizer.state and inner.param_groups is optimizer.param_groups:
                return _behind(inner)
    return optimizer


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` needs a closure, as that of L-BFGS, whose state is a history without initial state."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _double(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """A copy of the optimizer without its parameters, state and hooks."""
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise TypeError(f"it steps other optimizers ({', '.join(inner)}), which have the parameters")
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    # A `step` on the instance is a patch, for instance a scheduler's counter, bound to the original.
    double.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    double.__dict__.update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    double.state = defaultdict(dict)
    double.param_groups = [group]
    return double


def _create_without_stepping(double: torch.optim.Optimizer) -> None:
    """Run the part of PyTorch's own optimizers that makes missing state; its other arguments are lists to fill."""
    init_group = state_maker_of(double)
    if init_group is not None:
        group, *lists = inspect.signature(init_group).parameters
        init_group(double.param_groups[0], *([] for _ in lists))


def _step(double: torch.optim.Optimizer) -> None:
    group = double.param_groups[0]
    if "lr" in group:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    step = type(double).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # without the process-wide step hooks
    step(double)


def _rewind(state: dict[str, Any]) -> None:
    count = state.get("step")
    if isinstance(count, torch.Tensor):
        count.zero_()
    elif count is not None:
        state["step"] = 0
