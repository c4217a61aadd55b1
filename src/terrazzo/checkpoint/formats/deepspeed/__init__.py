"""Read and write DeepSpeed's checkpoints."""

from terrazzo.checkpoint.formats.deepspeed.reader import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
