"""PyTorch's optimizers over DTensors: the lists of a step are unwrapped once.

A step with `foreach=True` is a dozen list operations, each of which would find out again that its tensors are DTensors,
placed alike. The functions that make such a step work element by element, tensor by tensor, so they may as well be
given the local tensors in the first place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim import adadelta, adagrad, adam, adamax, nadam, optimizer, radam, rmsprop
from torch.utils import _foreach_utils

from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.foreach import locals_of, placed_alike

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


def _on_locals(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def run(parameters: list[Any], *lists: Any, **options: Any) -> None:
        if (
            not any(isinstance(p, DTensor) for p in parameters)
            or options.get("differentiable")
            or not placed_alike(parameters, [*lists, *options.values()])
        ):
            step(parameters, *lists, **options)
            return
        local_lists = [locals_of(values) for values in lists]
        step(locals_of(parameters), *local_lists, **{k: locals_of(v) for k, v in options.items()})

    return run
