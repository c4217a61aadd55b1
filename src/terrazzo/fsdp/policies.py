"""Policies of `fully_shard`: dtypes, and what is kept on the CPU."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from terrazzo.comm.codecs import Codec
from terrazzo.errors import FSDPValueError


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module computes, reduces and returns, and what it sends. Sharded parameters keep their own.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_forward_inputs
    True

    Args:
        param_dtype: The dtype of parameters in forward and backward, and of their all-gather. None: their own.
        reduce_dtype: The dtype in which gradients are reduced, or accumulated without reduction. None: their own.
        output_dtype: The dtype to which floating-point outputs of forward are cast. None: not cast.
        cast_forward_inputs: Whether floating-point inputs of forward are cast to `param_dtype`.
        gather_codec: How parameters of two or more dims are gathered, such as `Float8Rows()`; forward and backward use
            what was decoded, in `param_dtype`. None: in `param_dtype`.
        reduce_codec: How their gradients are sent to the ranks that add them, in float32, and over the replicas of
            HSDP. None: in `reduce_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: KW_ONLY
    gather_codec: Codec | None = None
    reduce_codec: Codec | None = None


@dataclass(frozen=True)
class OffloadPolicy:
    """Sharded state stays on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and optimizer state on the CPU, or only the last two, or only the last.

    By default sharded parameters and gradients are on the CPU, and the optimizer runs there. Shards are copied to the
    device for each all-gather, and reduced gradients back to the CPU.

    With `parameters=False`, parameters stay on the device, and the optimizer runs there. Its state, which for Adam has
    twice the parameters' size, is copied to the device for each step and back afterwards. With `gradients=True` reduced
    gradients are on the CPU, too, where those of several backwards are added, until `.grad` is asked for, as clipping
    and optimizers do: then they are copied to the device, and stay there until they are set to None.

    `.grad` is always on the device of its parameter, as PyTorch requires. With a CPU mesh nothing changes.

    >>> CPUOffloadPolicy()
    CPUOffloadPolicy(pin_memory=True, parameters=True, optimizer_state=True, gradients=False)

    Args:
        pin_memory: Whether the CPU memory is page-locked, so that copies overlap with computation. Other processes
            cannot use it then.
        parameters: Whether sharded parameters, and therefore their gradients, are kept on the CPU.
        optimizer_state: Whether optimizer state is kept on the CPU. Must be True if `parameters` is.
        gradients: Whether gradients of parameters on the device are kept on the CPU until they are asked for.
    """

    pin_memory: bool = True
    _: KW_ONLY
    parameters: bool = True
    optimizer_state: bool = True
    gradients: bool = False

    def __post_init__(self) -> None:
        if self.parameters and not self.optimizer_state:
            raise FSDPValueError(
                "CPUOffloadPolicy(parameters=True, optimizer_state=False) is not possible: an optimizer's state is on "
                "the device of its parameters. Use optimizer_state=True or parameters=False"
            )
