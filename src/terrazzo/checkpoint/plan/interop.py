"""The shards of PyTorch's `ShardedTensor`, which has no `__create_chunk_list__`."""

from __future__ import annotations

import sys
from typing import Any

from terrazzo.layout.box import Box

_MODULE = "torch.distributed._shard.sharded_tensor"


def is_sharded_tensor_type(kind: type) -> bool:
    """Whether this is `ShardedTensor`, without importing its module: before an import there are no instances."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.ShardedTensor)


def local_shards(value: Any) -> list[tuple[Box, Any]]:
    """This rank's shards: their boxes and data."""
    return [
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in value.local_shards()
    ]
