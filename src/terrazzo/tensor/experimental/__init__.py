"""Features whose interface may still change."""

from terrazzo.tensor.experimental.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from terrazzo.tensor.experimental.local_map import local_map
from terrazzo.tensor.experimental.register_sharding import (
    register_decomposition,
    register_loops,
    register_sharding,
    register_single_dim_strategy,
    unregister_sharding,
)
from terrazzo.tensor.links import implicit_replication

__all__ = [
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_decomposition",
    "register_loops",
    "register_sharding",
    "register_single_dim_strategy",
    "set_rotate_method",
    "unregister_sharding",
]
