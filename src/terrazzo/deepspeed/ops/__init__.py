"""DeepSpeed's optimizers under their names: PyTorch's, or the engine's own where PyTorch has none."""

from terrazzo.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
