"""The exception that ranks raise together, under the name of PyTorch's module."""

from terrazzo.errors import CheckpointException

__all__ = ["CheckpointException"]
