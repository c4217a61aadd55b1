"""Optimizers that need each matrix of sharded parameters whole, and the exchange that they are built on."""

from terrazzo.optim.muon import Muon, MuonWithAuxAdam
from terrazzo.optim.owners import Owners

__all__ = ["Muon", "MuonWithAuxAdam", "Owners"]
