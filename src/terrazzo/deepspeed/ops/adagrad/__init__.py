"""Adagrad under the name of DeepSpeed's kernel; PyTorch's implementation."""

from torch.optim import Adagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
