"""The placements, in a module of the name that has them in PyTorch too."""

from terrazzo.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
