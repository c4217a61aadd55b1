"""Tools that show what distributed tensors do: which rank holds what, and what is communicated where."""

from terrazzo.tensor.debug.comm_mode import CommDebugMode
from terrazzo.tensor.debug.counts import ByCollective
from terrazzo.tensor.debug.record import Collective, Operation
from terrazzo.tensor.debug.sharding import ShardingPicture, sharding_picture, visualize_sharding

__all__ = [
    "ByCollective",
    "Collective",
    "CommDebugMode",
    "Operation",
    "ShardingPicture",
    "sharding_picture",
    "visualize_sharding",
]
