"""Distributed training state for PyTorch: tensors, sharding, checkpoints, and the engine that uses them."""

__version__ = "0.1.0"
