"""What a user may choose for a group of parameters: precisions, and where sharded state rests."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from terrazzo.errors import FSDPValueError


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
    """What rests on the CPU while nothing computes with it: everything that is sharded, or only the optimizer's state.

    By default sharded parameters and gradients rest on the CPU, so the optimizer and its state live there. Shards are
    copied to the device for each all-gather, and reduced gradients back to the CPU.

    With `parameters=False` parameters and gradients stay on the device, and the optimizer steps there: its state, twice
    the parameters' size for Adam, is brought there for each step and rests on the CPU during forward and backward.

    Gradients always are where their parameters are: PyTorch has no other `.grad`. On a CPU mesh there is nothing to
    move.

    >>> CPUOffloadPolicy()
    CPUOffloadPolicy(pin_memory=True, parameters=True, optimizer_state=True)

    Args:
        pin_memory: Whether the CPU memory is page-locked, so that copies overlap with computation. It is then not
            available to other processes.
        parameters: Whether sharded parameters, and so their gradients, rest on the CPU.
        optimizer_state: Whether the optimizer's state does. Where the parameters are on the CPU it is there anyhow.
    """

    pin_memory: bool = True
    _: KW_ONLY
    parameters: bool = True
    optimizer_state: bool = True

    def __post_init__(self) -> None:
        if self.parameters and not self.optimizer_state:
            raise FSDPValueError(
                "CPUOffloadPolicy(parameters=True, optimizer_state=False): an optimizer has its state where its "
                "parameters are; keep the state on the CPU too, or the parameters on the device"
            )
