"""`deepspeed.utils.groups`: the process groups of an engine's ranks, which all see different data."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from terrazzo.errors import EngineConfigError


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing for one rank per expert group; other sizes are not supported."""
    if ep_size != 1 or mpu is not None:
        raise EngineConfigError(
            f"groups.initialize(ep_size={ep_size}) is not supported: experts are not divided among ranks, every rank "
            "has all of them"
        )


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_model_parallel_world_size() -> int:
    return 1


_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_world_size = _get_model_parallel_world_size
get_data_parallel_group, get_data_parallel_rank = _get_data_parallel_group, _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size


def _get_model_parallel_rank() -> int:
    return 0


_get_sequence_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank = _get_model_parallel_rank

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]
