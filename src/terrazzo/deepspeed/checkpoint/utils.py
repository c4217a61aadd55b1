"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo._torch.dispatching import tree_map


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same nested lists, tuples and dicts, with a copy of each tensor on a device.

    >>> clone_tensors_for_torch_save({"step": 3, "x": [torch.ones(4)[:1]]})
    {'step': 3, 'x': [tensor([1.])]}
    """
    return tree_map(lambda x: x.detach().to(device, copy=True) if isinstance(x, Tensor) else x, item)


__all__ = ["clone_tensors_for_torch_save"]
