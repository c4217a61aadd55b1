"""Read and write DeepSpeed's checkpoints."""

from terrazzo.checkpoint.formats.deepspeed.format import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
