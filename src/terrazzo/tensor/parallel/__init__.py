"""Tensor and sequence parallelism for modules: a plan gives each module, by name, a style.

The names and behaviours are those of `torch.distributed.tensor.parallel`.
"""

from terrazzo.tensor.parallel.loss import loss_parallel
from terrazzo.tensor.parallel.parallelize import parallelize_module
from terrazzo.tensor.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from terrazzo.tensor.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
