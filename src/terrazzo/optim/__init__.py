"""Optimizers that need whole matrices of sharded parameters, and what they are built on."""

from terrazzo.optim.muon import Muon
from terrazzo.optim.owners import Owners

__all__ = ["Muon", "Owners"]
