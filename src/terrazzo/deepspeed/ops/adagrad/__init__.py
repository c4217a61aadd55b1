"""Adagrad by the name of DeepSpeed's kernel, done by PyTorch's."""

from torch.optim import Adagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
