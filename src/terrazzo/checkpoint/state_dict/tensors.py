"""Moving values between full, distributed and CPU form, and rank 0's full state dict to every rank.

A distributed tensor is known by what it can do (`__create_chunk_list__`, `full_tensor`), so PyTorch's DTensor and
terrazzo's are treated alike.

A broadcast first sends the structure (keys, values that are not tensors, shapes and dtypes of tensors), so that every
rank knows what follows, and an error of rank 0 is raised on all ranks; then each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terrazzo._torch.groups import default_group, device_types
from terrazzo.checkpoint.plan.sharded import ShardViews
from terrazzo.errors import CheckpointError, CheckpointMismatchError


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
    for box, part in ShardViews().view(name, target).chunks:
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


# ------------------------------------------------------------------ rank 0's full state dict on every rank


@dataclass(frozen=True)
class _Coming:
    """A placeholder for a tensor that will be broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_state(
    given: Callable[[], dict[str, Any]], receive: Callable[[tuple[Any, ...], torch.Tensor], Any]
) -> dict[str, Any]:
    """Rank 0's nested state on every rank, with `receive(path, full tensor)` instead of each tensor.

    Only rank 0 calls `given`; its errors are raised on every rank. `receive` is called when its tensor has arrived, and
    the full tensor is then freed, so that there is one at a time. Errors of `receive` are raised at the end, on every
    rank, because other ranks would wait for a rank that left in the middle.
    """
    if not dist.is_available() or not dist.is_initialized():
        return map_paths(given(), lambda path, v: receive(path, v) if isinstance(v, torch.Tensor) else v)
    source = dist.get_rank() == 0
    device = wire_device()
    tensors: list[torch.Tensor] = []  # on rank 0

    def announced(path: tuple[Any, ...], value: Any) -> Any:
        if is_distributed(value):
            raise CheckpointError(
                f"rank 0 cannot broadcast {'.'.join(map(str, path))}: it is distributed, but broadcast_from_rank0 "
                "needs a full state dict: use StateDictOptions(full_state_dict=True) to get it"
            )
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _Coming(tuple(value.shape), value.dtype)

    structure = from_rank(0, lambda: map_paths(given(), announced))
    coming = iter(tensors)
    refused: list[str] = []

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, _Coming):
            return value
        if source:
            whole = next(coming).detach().to(device).contiguous()
        else:
            whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        dist.broadcast(whole, src=0)
        try:
            return receive(path, whole)
        except Exception as error:  # other ranks wait for this one
            refused.append(str(error) if isinstance(error, CheckpointError) else repr(error))
            return None

    result: dict[str, Any] = map_paths(structure, take)
    _raise_everywhere(refused)
    return result


def from_rank(source: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `make` on one rank, or its error, on every rank. Without a process group, of this one."""
    message: list[Any] = [None, None]
    grouped = dist.is_available() and dist.is_initialized()
    if not grouped or dist.get_rank() == source:
        try:
            message[0] = make(*arguments)
        except Exception as error:  # other ranks wait for this one
            message[1] = error
    if grouped:
        dist.broadcast_object_list(message, src=source)
    if message[1] is not None:
        raise message[1]
    return message[0]


def _raise_everywhere(refused: list[str]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, refused)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(everyone) for line in found]
    if lines:
        raise CheckpointError("the broadcast state dict does not fit:\n  " + "\n  ".join(lines))


def wire_device() -> torch.device:
    """A device whose tensors the default group can broadcast; the CPU if possible."""
    devices = device_types(default_group())
    cpu = torch.device("cpu")
    if cpu in devices or not devices:
        return cpu
    kind = devices[0].type
    return torch.device(kind, getattr(torch, kind).current_device())
