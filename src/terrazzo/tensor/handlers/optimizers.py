"""PyTorch's optimizers over DTensors: the lists of a step are unwrapped once.

A step with `foreach=True` is a dozen list operations, each of which would find out again that its tensors are DTensors,
placed alike. The functions that make such a step work element by element, tensor by tensor, so they may as well be
given the local tensors in the first place.

Before it, every optimizer collects its parameters and asks each what it is. A wrapper knows its dtype and shape, so
these questions need not go through `__torch_function__`; state that is made there comes through `__torch_dispatch__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import adadelta, adagrad, adam, adamax, nadam, optimizer, radam, rmsprop
from torch.utils import _foreach_utils

from terrazzo.tensor.copied_view import CopiedView
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.foreach import locals_of, placed_alike

# These write their tensors in place and leave the lists alone. SGD's and ASGD's put new tensors into the lists.
_ELEMENTWISE: dict[ModuleType, str] = {
    adadelta: "_multi_tensor_adadelta",
    adagrad: "_multi_tensor_adagrad",
    adam: "_multi_tensor_adam",
    adamax: "_multi_tensor_adamax",
    nadam: "_multi_tensor_nadam",
    radam: "_multi_tensor_radam",
    rmsprop: "_multi_tensor_rmsprop",
}


def install() -> None:
    """Let PyTorch's optimizers and clipping take lists of DTensors as lists of tensors, and unwrap them once."""
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if DTensor not in known:
            known.append(DTensor)
    for module, name in _ELEMENTWISE.items():
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _on_locals(function))
    for kind in _optimizers():
        kind._init_group = _asking_wrappers(kind._init_group)


def _optimizers() -> list[Any]:
    """The classes that collect their parameters in a method of their own."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, optimizer.Optimizer) and "_init_group" in vars(kind)]


def _asking_wrappers(collect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collect)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return collect(*args, **kwargs)

    return run


def _on_locals(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def run(parameters: list[Any], *lists: Any, **options: Any) -> None:
        if (
            not any(isinstance(p, DTensor) for p in parameters)
            or options.get("differentiable")
            or CopiedView in map(type, parameters)
            or not placed_alike(parameters, [*lists, *options.values()])
        ):
            step(parameters, *lists, **options)
            return
        local_lists = [locals_of(values) for values in lists]
        step(locals_of(parameters), *local_lists, **{k: locals_of(v) for k, v in options.items()})

    return run
