"""DeepSpeed's checkpoints, read as if they were terrazzo's own."""

from terrazzo.checkpoint.formats.deepspeed.reader import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
