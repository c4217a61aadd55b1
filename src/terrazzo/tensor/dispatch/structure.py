"""Arguments and results of operations as trees: tensors in tuples, lists, named tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def tied_to(result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """`result`, which does not depend on `sources`, with them in its graph: their gradients are 0, to any order.

    On a rank that has nothing to compute, because other ranks' backward communicates with this one's.
    """
    for source in sources:
        if source.requires_grad and torch.is_grad_enabled():
            nothing = source.reshape(-1)[:0].sum()
            nothing = nothing.real if nothing.is_complex() and not result.is_complex() else nothing
            result = result + nothing.to(result.dtype)
    return result


def of_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same dtype and number of dims with one element, which as an index is in bounds."""
    make = torch.ones if tensor.is_floating_point() else torch.zeros
    return make((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)


def get_at(args: Sequence[Any], kwargs: Any, path: tuple[Any, ...]) -> Any:
    value = kwargs[path[0]] if type(path[0]) is str else args[path[0]]
    for step in path[1:]:
        value = value[step]
    return value


def put_at(loc: list[Any], kw: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    holder: Any = kw if type(path[0]) is str else loc
    holder[path[0]] = _replaced(holder[path[0]], path[1:], value)


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], new)
    return tuple(copy) if type(value) is tuple else copy
