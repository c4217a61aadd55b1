"""Helpers that scripts import from `deepspeed.runtime.utils`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from terrazzo._torch.dispatching import tree_map
from terrazzo.deepspeed.accelerator import get_accelerator
from terrazzo.deepspeed.pipe.partition import balanced as partition_balanced
from terrazzo.deepspeed.pipe.partition import uniform as partition_uniform
from terrazzo.tensor import DTensor

LOGGER = logging.getLogger("terrazzo.deepspeed")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory that tensors on the accelerator use, and its maximum so far."""
    if force:
        found = get_accelerator()
        now, peak = found.memory_allocated() / 2**30, found.max_memory_allocated() / 2**30
        LOGGER.info("%s: %.2f GiB, at most %.2f GiB", message, now, peak)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, mpu: Any = None
) -> Tensor:
    """Clip gradients to a norm of all parameters together, those of sharded parameters too; returns that norm."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sums of the first one, two, ... weights.

    >>> prefix_sum_inc([3, 4, 5])
    [3, 7, 12]
    """
    return list(accumulate(weights))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """The tensors in a nested structure on a device; with `criterion_func` only those for which it is true."""

    def moved(x: Any) -> Any:
        wanted = isinstance(x, Tensor) if criterion_func is None else criterion_func(x)
        return x.to(device) if wanted else x

    return tree_map(moved, item)


__all__ = [
    "clip_grad_norm_",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
]
