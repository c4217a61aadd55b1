"""Moving values between full, distributed and CPU form.

A distributed tensor is known by what it can do (`__create_chunk_list__`, `full_tensor`), so PyTorch's DTensor and
terrazzo's are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from terrazzo.checkpoint.plan.sharded import Viewer
from terrazzo.errors import CheckpointMismatchError


def is_distributed(value: object) -> bool:
    """Whether `value` is a tensor of which this rank may hold only a part.

    >>> is_distributed(torch.zeros(2))
    False
    """
    return isinstance(value, torch.Tensor) and hasattr(value, "__create_chunk_list__") and hasattr(value, "full_tensor")


def map_paths(value: Any, fn: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """A copy of nested dicts, lists and tuples, with `fn(path, leaf)` in the place of each leaf, in order.

    >>> map_paths({"a": [1, (2,)]}, lambda path, x: (path, x))
    {'a': [(('a', 0), 1), ((('a', 1, 0), 2),)]}
    """
    if isinstance(value, Mapping):
        return {key: map_paths(item, fn, (*path, key)) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_paths(item, fn, (*path, i)) for i, item in enumerate(value)))
    if type(value) in (list, tuple):
        return type(value)(map_paths(item, fn, (*path, i)) for i, item in enumerate(value))
    return fn(path, value)


def full(value: Any) -> Any:
    """The whole tensor on every rank; anything that is not distributed unchanged. Collective."""
    if is_distributed(value):
        with torch.no_grad():
            return value.full_tensor()
    return value


def on_cpu(value: Any) -> Any:
    """The value in CPU memory; anything that is not a tensor unchanged."""
    return value.cpu() if isinstance(value, torch.Tensor) or hasattr(value, "local_shards") else value


def gathered(state: dict[str, Any], *, to_cpu: bool, keep: bool) -> dict[str, Any]:
    """Every tensor of `state` in full. With `keep` false this rank takes part in the gathering but keeps nothing."""

    def gather(_: tuple[Any, ...], value: Any) -> Any:
        whole = full(value)
        if not keep:
            return None
        return on_cpu(whole) if to_cpu else whole

    result: dict[str, Any] = map_paths(state, gather)
    return result if keep else {}


@torch.no_grad()
def write_full(target: torch.Tensor, whole: torch.Tensor, name: str) -> None:
    """Copy this rank's part of `whole` into `target`, in place and without communication."""
    if tuple(target.shape) != tuple(whole.shape):
        raise CheckpointMismatchError(
            f"{name}: the value has shape {tuple(whole.shape)}, the model's tensor has {tuple(target.shape)}"
        )
    if not is_distributed(target):
        target.copy_(whole)
        return
    for box, part in Viewer().view(name, target).chunks:
        part.copy_(whole[box.slices()])


@torch.no_grad()
def laid_out_like(value: Any, like: torch.Tensor, name: str) -> Any:
    """`value` with the layout of `like`: distributed the same way, or plain where `like` is plain.

    Values of another shape (an optimizer's step counter, a factored moment) stay as they are. Collective where both
    are distributed, but differently.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(like.shape):
        return value
    if not is_distributed(like):
        return full(value)
    if is_distributed(value):
        if value.device_mesh == like.device_mesh:  # type: ignore[attr-defined]  # duck-typed
            if tuple(value.placements) == tuple(like.placements):  # type: ignore[attr-defined]  # duck-typed
                return value
            return value.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]  # duck-typed
        value = full(value)
    result = torch.empty_like(like, dtype=value.dtype)
    write_full(result, value, name)
    return result
