"""DeepSpeed's optimizers under their names: PyTorch's, or the engine's own where PyTorch has none."""

from terrazzo.deepspeed.ops import adagrad, adam, lamb, lion, op_builder

__compatible_ops__ = op_builder.COMPATIBLE

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder"]
