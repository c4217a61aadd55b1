"""Activation checkpointing by DeepSpeed's names, done by `torch.utils.checkpoint`.

The options that `configure` takes say where DeepSpeed keeps the inputs of a checkpointed function; here they stay where
they are.  Random numbers of the recomputation are those of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result; what it keeps for backward is computed again there.

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
    """Take DeepSpeed's options; they say where activations are kept, and nothing follows from them here."""
    global _configured
    _configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Nothing is kept, so there is nothing to reset."""


def set_num_layers(nlayers: int) -> None:
    """Nothing depends on it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing depends on it."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank.  Random numbers of tensors on many ranks depend on the seed and the global index alone."""
    torch.manual_seed(seed)
