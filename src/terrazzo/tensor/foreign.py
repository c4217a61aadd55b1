"""PyTorch's own distributed tensors, where terrazzo's or plain ones are expected."""

from __future__ import annotations

from typing import Any

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
