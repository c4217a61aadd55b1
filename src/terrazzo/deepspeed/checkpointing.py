"""Activation checkpointing under DeepSpeed's names, based on `torch.utils.checkpoint`.

The options of `configure` say where DeepSpeed keeps the inputs of a checkpointed function; here they stay where they
are, and a warning says so. The recomputation draws the same random numbers as the forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result; its intermediate values are recomputed in backward.

    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(lambda v: v.sin().sum(), x).backward()
    >>> torch.equal(x.grad, torch.ones(2).cos())
    True
    """
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`."""
    return checkpoint(function, *args)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    **others: Any,
) -> None:
    """Accepts DeepSpeed's options for where activations are kept, which have no effect here.

    Options that would save memory in DeepSpeed are warned about.
    """
    global _configured
    _configured = True
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    _warn([name for name, value in asked.items() if value])


def _warn(options: list[str]) -> None:
    if options:
        warnings.warn(
            f"{', '.join(options)}: no effect here, inputs of checkpointed functions stay on their device, whole",
            stacklevel=3,
        )


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Does nothing: there is no state to reset."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing here."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Has no effect here; warns if it is asked for."""
    _warn(["partition_activations_in_checkpoint"] if partition_activation else [])


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank. Random numbers of DTensors depend only on the seed and the global index."""
    torch.manual_seed(seed)
