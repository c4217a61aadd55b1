"""Broadcast rank 0's full state dict, one tensor at a time.

First the structure is sent (keys, values that are not tensors, shapes and dtypes of tensors), so that every rank knows
what follows, and an error of rank 0 is raised on all ranks; then each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terrazzo._torch.groups import default_group, device_types
from terrazzo.checkpoint.state_dict.tensors import is_distributed, map_paths
from terrazzo.errors import CheckpointError


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
        alone: dict[str, Any] = map_paths(given(), lambda path, v: receive(path, v) if _is_tensor(v) else v)
        return alone
    source = dist.get_rank() == 0
    device = wire_device()
    state: dict[str, Any] = {}

    def announced() -> Any:
        nonlocal state
        state = given()
        return map_paths(state, _announce)

    structure = _agree_on(announced if source else None)
    tensors = iter(_tensors(state))
    refused: list[str] = []

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, _Coming):
            return value
        if source:
            whole = next(tensors).detach().to(device).contiguous()
        else:
            whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        dist.broadcast(whole, src=0)
        try:
            return receive(path, whole)
        except CheckpointError as error:
            refused.append(str(error))
            return None

    result: dict[str, Any] = map_paths(structure, take)
    _raise_everywhere(refused)
    return result


def _agree_on(announced: Callable[[], Any] | None) -> Any:
    """Rank 0's structure, or its error, on every rank."""
    message: list[Any] = [None]
    if announced is not None:
        try:
            message[0] = announced()
        except CheckpointError as error:
            message[0] = error
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], CheckpointError):
        raise message[0]
    return message[0]


def _announce(path: tuple[Any, ...], value: Any) -> Any:
    if is_distributed(value):
        raise CheckpointError(
            f"rank 0 cannot broadcast {'.'.join(map(str, path))}: it is distributed, but broadcast_from_rank0 needs a "
            "full state dict: use StateDictOptions(full_state_dict=True) to get it"
        )
    return _Coming(tuple(value.shape), value.dtype) if _is_tensor(value) else value


def _raise_everywhere(refused: list[str]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, refused)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(everyone) for line in found]
    if lines:
        raise CheckpointError("the broadcast state dict does not fit:\n  " + "\n  ".join(lines))


def _tensors(state: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_paths(state, lambda _, value: found.append(value) if _is_tensor(value) else None)
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def wire_device() -> torch.device:
    """A device whose tensors the default group can broadcast; the CPU if possible."""
    devices = device_types(default_group())
    cpu = torch.device("cpu")
    if cpu in devices or not devices:
        return cpu
    kind = devices[0].type
    return torch.device(kind, getattr(torch, kind).current_device())
