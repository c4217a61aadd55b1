"""Element-wise kernels that torch compiles for CUDA and ROCm, from text, when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from terrazzo._torch.declared import private

_create: Any = private(
    "torch.cuda.jiterator._create_jit_fn",
    "random numbers of DTensors on CUDA take one pass over the memory instead of thirteen",
    instead=None,
)


def elementwise(text: str, *numbers: str) -> Callable[..., torch.Tensor] | None:
    """The kernel of a C++ function template; `numbers` are the parameters that are numbers. None where torch has none.

    Each call takes tensors, and these numbers by name. The first one makes the kernel: torch asks CUDA for its devices
    then, and a process that has asked cannot fork others that use them.
    """
    if _create is None:
        return None
    made = cache(lambda: _create(text, **dict.fromkeys(numbers, 0)))
    return lambda *tensors, **values: made()(*tensors, **values)
