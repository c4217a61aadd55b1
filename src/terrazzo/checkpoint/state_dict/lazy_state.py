"""What an optimizer's state would be for a parameter that it has not stepped yet.

Optimizers make their state in the first `step`.  To load into an optimizer that has not stepped, or to save one so
that every parameter has an entry, the state must be known before.  Stepping the optimizer itself (with zero gradients
and learning rate, as PyTorch's own state-dict functions do) changes it: Adam's step counter becomes 1, NAdam's
momentum product is multiplied, Rprop's step size becomes 0.  Here the optimizer's own code runs on a stand-in, an
optimizer of the same class that holds a copy of one parameter; the user's parameters, gradients, state and counters
are not touched.
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
    """The state that `optimizer` starts from for `param` under the hyperparameters of `group`; {} if it keeps none.

    Exact for PyTorch's optimizers.  One that makes its state only while stepping (SGD's momentum, optimizers from
    elsewhere) takes a step with zero gradient and learning rate, and its "step" is set back to zero; for SGD that is
    the same as no state unless `dampening` is used.

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
            "zero gradient; take one optimizer step before its state dict is read or set"
        ) from error
    return dict(double.state[stand_in])


def complete_state(optimizer: torch.optim.Optimizer, by_index: dict[str, Any] | None = None) -> dict[str, Any]:
    """`optimizer.state_dict()` (or what it returned before), with the entries of parameters that were never stepped."""
    by_index = optimizer.state_dict() if by_index is None else by_index
    if not keyed_by_index(by_index):
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() is not of the form of torch.optim's ('state' by a parameter's "
            "number, and 'param_groups'); use the optimizer's own state dict, or the optimizers that it is made of"
        )
    state = dict(by_index["state"])
    index = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not state.get(index) and (initial := initial_state(optimizer, param, group)):
                state[index] = initial
            index += 1
    return {**by_index, "state": state}


def keyed_by_index(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state dict is of torch's form; containers of several optimizers have others."""
    return isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)


def _behind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, or the one that it passes everything on to, as Accelerate's and Lightning's wrappers do."""
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            if inner.state is optimizer.state and inner.param_groups is optimizer.param_groups:
                return _behind(inner)
    return optimizer


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """L-BFGS and its like: their state is the history of a search, there is none before the first step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _double(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer like `optimizer` in everything but its parameters, state and hooks."""
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise TypeError(f"it steps other optimizers ({', '.join(inner)}), which hold the real parameters")
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    # An instance's own `step` is a patch (a scheduler's counter, say) bound to the original.
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
