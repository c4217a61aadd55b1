"""Features whose interface may still change."""

from terrazzo.tensor.experimental.local_map import local_map
from terrazzo.tensor.experimental.register_sharding import register_sharding, unregister_sharding
from terrazzo.tensor.experimental.replication import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding", "unregister_sharding"]
