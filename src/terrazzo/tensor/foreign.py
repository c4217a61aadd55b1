"""Tensors of other classes where terrazzo expects its own or plain ones: PyTorch's DTensor, tensor subclasses."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.comm.wrapped import is_wrapper, why_not_sent
from terrazzo.errors import DTensorArgumentError, DTensorTypeError


def is_torch_dtensor(kind: type) -> bool:
    """Whether a class is PyTorch's DTensor or derives from it; this module does not import PyTorch's DTensor."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed.tensor") for c in kind.__mro__)


def check_plain(function: str, value: Any) -> None:
    """Raise if `value` is no tensor, or PyTorch's DTensor, whose global shape would be sharded again."""
    if not isinstance(value, torch.Tensor):
        raise DTensorTypeError(f"{function} takes a tensor, not {type(value).__name__}: torch.tensor makes one")
    if is_torch_dtensor(type(value)):
        raise DTensorArgumentError(
            f"{function} got a DTensor of torch.distributed.tensor, which terrazzo cannot use: create all DTensors "
            "with terrazzo.tensor, or convert this one with terrazzo.tensor.interop.from_torch_dtensor"
        )


def refuse_packed(function: str, value: torch.Tensor) -> None:
    """Raise if `value` is a parameter of packed bytes, whose meaning is an attribute that no part would have."""
    found = [name for name in _MEANINGS if getattr(value, name, None) is not None]
    if found and isinstance(value, torch.nn.Parameter):
        raise DTensorArgumentError(
            f"{function} cannot cut a {type(value).__name__}: its {value.dtype} elements mean nothing without its "
            f"{found[0]}, which describes all of them. Quantize each rank's part, or use torchao's NF4 tensors; "
            "fully_shard takes it as it is"
        )


_MEANINGS = ("quant_state", "SCB")  # bitsandbytes' Params4bit and Int8Params


def refuse_subclass(function: str, value: torch.Tensor, whole_parts: bool = False) -> None:
    """Raise if `value`, which is to be communicated, is of a subclass whose elements cannot be sent.

    `whole_parts`: it is only cut and joined, which the collectives of wrappers refuse themselves where they must.
    """
    kind = type(value)
    if kind is torch.Tensor or kind.__module__.startswith("torch._subclasses"):  # fake tensors, for example
        return
    if is_wrapper(value):
        why = None if whole_parts else why_not_sent(value)
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not hasattr(value, "trigger_wait"):
        why = "it has its own operations and no __tensor_flatten__ that says which tensors it wraps"
    else:
        why = None  # it stores its elements as a plain tensor does, or is an AsyncCollectiveTensor
    if why is not None:
        raise DTensorArgumentError(
            f"{function} cannot cut a {kind.__name__} of shape {tuple(value.shape)} and send its elements: {why}. Give "
            "each rank its part with DTensor.from_local, cut the tensor locally on every rank with "
            "distribute_tensor(..., src_data_rank=None), or convert it to a plain tensor first"
        )
