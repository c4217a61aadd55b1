"""Arguments and results of operations as trees: tensors in tuples, lists, named tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo._torch.dispatching import unseen


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


def on_one_element(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func` returns, or raises, for plain tensors of one element: of its dtypes and errors something is learned.

    They have the dtypes and numbers of dims of the given ones, and as indices are in bounds.
    """

    def one(t: torch.Tensor) -> torch.Tensor:
        make = torch.ones if t.is_floating_point() else torch.zeros
        return make((1,) * t.ndim, dtype=t.dtype, device=t.device)

    with unseen():
        return func(*map_tensors(list(args), one), **map_tensors(dict(kwargs), one))


def on_stand_ins(
    func: Callable[..., Any],
    loc: Sequence[Any],
    kw: Mapping[str, Any],
    paths: Sequence[tuple[Any, ...]],
    stand_ins: Sequence[torch.Tensor],
) -> Any:
    """What `func` returns, or raises, for other tensors than those at `paths`: without data, or of other shapes."""
    args, kwargs = list(loc), dict(kw)
    for path, stand_in in zip(paths, stand_ins, strict=True):
        put_at(args, kwargs, path, stand_in)
    with unseen():
        return func(*args, **kwargs)


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
