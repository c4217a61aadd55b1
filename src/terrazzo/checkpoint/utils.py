"""Look-ups for custom planners: a tensor's chunk, or any value, by its index."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, MetadataIndex
from terrazzo.checkpoint.plan.sharded import ShardViews, is_sharded
from terrazzo.errors import IndexMismatchError

__all__ = ["find_state_dict_object", "find_tensor_shard"]


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """This rank's chunk of a tensor at the index's offsets. A plain tensor is one chunk.

    >>> find_tensor_shard(torch.ones(2), MetadataIndex("w", (0,)))
    tensor([1., 1.])
    """
    if is_sharded(tensor):
        if index.offset is None:
            raise IndexMismatchError(f"FQN {index.fqn!r} is a distributed tensor, but no offset was provided")
        for box, local in ShardViews().view(index.fqn, tensor).chunks:
            if tuple(index.offset) == box.offsets:
                return local
        raise IndexMismatchError(
            f"FQN {index.fqn!r}: this rank has no chunk at {tuple(index.offset)} (Could not find shard)"
        )
    if index.offset is not None and any(index.offset):
        raise IndexMismatchError(
            f"FQN {index.fqn!r} is a plain tensor and no ShardedTensor: it has no chunk at {tuple(index.offset)}"
        )
    return tensor


def find_state_dict_object(state_dict: STATE_DICT_TYPE, index: MetadataIndex) -> Any:
    """The value of a flat state dict at an index: for a tensor the chunk.

    >>> find_state_dict_object({"step": 3}, MetadataIndex("step"))
    3
    """
    if index.fqn not in state_dict:
        raise IndexMismatchError(f"the state dict has no FQN {index.fqn!r}")
    value = state_dict[index.fqn]
    if isinstance(value, torch.Tensor) or is_sharded(value):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise IndexMismatchError(
            f"FQN {index.fqn!r} is not a tensor, nor a ShardedTensor: it has no chunk at {tuple(index.offset)}"
        )
    return value
