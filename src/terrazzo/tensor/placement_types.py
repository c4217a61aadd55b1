"""The placements, under the module name that they have in PyTorch."""

from terrazzo.layout import Partial, Placement, Replicate, Shard
from terrazzo.layout.placement import _StridedShard as _StridedShard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
