"""The protocol of plain tensors that are parts of global ones, in the module where PyTorch 2.14 has it."""

from terrazzo.checkpoint.metadata import CheckpointableTensor

__all__ = ["CheckpointableTensor"]
