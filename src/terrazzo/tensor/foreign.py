"""Tensors of other classes, where terrazzo's or plain ones are expected: PyTorch's own DTensor, tensor subclasses."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.comm.wrapped import is_wrapper, why_not_sent
from terrazzo.errors import DTensorArgumentError


def is_torch_dtensor(kind: type) -> bool:
    """Whether a class is PyTorch's DTensor, which this package does not import, or derives from it."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed.tensor") for c in kind.__mro__)


def refuse_torch_dtensor(function: str, value: Any) -> None:
    """Raise if `value` is a DTensor of PyTorch's: taken for a plain tensor, its global shape would be sharded anew."""
    if is_torch_dtensor(type(value)):
        raise DTensorArgumentError(
            f"{function} got a DTensor of torch.distributed.tensor, which is no tensor of terrazzo's: make all "
            "DTensors with terrazzo.tensor, or convert this one with terrazzo.tensor.interop.from_torch_dtensor"
        )


def refuse_subclass(function: str, value: torch.Tensor) -> None:
    """Raise if `value`, which is to be communicated, is of a subclass whose elements cannot be sent one by one."""
    kind = type(value)
    if kind is torch.Tensor or kind.__module__.startswith("torch._subclasses"):  # what a compiler runs programs on
        return
    if is_wrapper(value):
        why = why_not_sent(value)
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not hasattr(value, "trigger_wait"):
        why = "it has operations of its own and no __tensor_flatten__ to say what it is made of"
    else:
        why = None  # it holds its elements as a plain tensor does, or it is a result that PyTorch waits for
    if why is not None:
        raise DTensorArgumentError(
            f"{function} cannot cut a {kind.__name__} of shape {tuple(value.shape)} and send its elements: {why}. Give "
            "each rank its part with DTensor.from_local, or let the tensor cut itself on every rank with "
            "distribute_tensor(..., src_data_rank=None); make a plain tensor of what is to be communicated"
        )
