"""DeepSpeed's optimizers by name; PyTorch's, and the engine's own where it has none."""

from terrazzo.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
