"""What a user may choose for a group of parameters: precisions, and where sharded state rests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Which precisions a module computes, reduces and answers in; the sharded parameters keep their own.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_forward_inputs
    True

    Args:
        param_dtype: Of the parameters during forward and backward, and of their all-gather. None: their own.
        reduce_dtype: Of the gradients' reduction and of accumulation without it. None: the gradients' own.
        output_dtype: To which floating-point outputs of forward are cast. None: not cast.
        cast_forward_inputs: Whether floating-point inputs of forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Sharded state stays on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters and gradients rest on the CPU, so the optimizer and its state live there.

    Shards are copied to the device for each all-gather, and reduced gradients back to the CPU. On a CPU mesh there is
    nothing to move.

    >>> CPUOffloadPolicy().pin_memory
    True

    Args:
        pin_memory: Whether the CPU memory is page-locked, so that copies overlap with computation. It is then not
            available to other processes.
    """

    pin_memory: bool = True
