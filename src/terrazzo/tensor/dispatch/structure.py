"""Results of operations as trees: tensors in tuples, lists, named tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(value: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with `make(tensor)` in place of each tensor.

    >>> map_tensors((torch.ones(2), [3, None]), lambda t: t.shape)
    (torch.Size([2]), [3, None])
    """
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(v, make) for v in value]
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(items)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, dict):
        return {k: map_tensors(v, make) for k, v in value.items()}
    return value


def of_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same dtype and number of dims with one element, which as an index is in bounds."""
    make = torch.ones if tensor.is_floating_point() else torch.zeros
    return make((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)
