"""Lion under the names of DeepSpeed's kernels."""

from terrazzo.engine.optimizers import Lion as DeepSpeedCPULion
from terrazzo.engine.optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
