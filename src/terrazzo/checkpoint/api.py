"""`CheckpointException`, which all ranks raise together, in the module where PyTorch has it."""

from terrazzo.errors import CheckpointException

__all__ = ["CheckpointException"]
