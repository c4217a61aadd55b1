"""The placements, under the module name that they have in PyTorch."""

from terrazzo.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
