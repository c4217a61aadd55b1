"""Tensor and sequence parallelism for modules: a plan gives each module, by name, a style.

The names and behaviours are those of `torch.distributed.tensor.parallel`.
"""

from terrazzo.tensor.ops.cross_entropy import loss_parallel
from terrazzo.tensor.parallel.experts import ExpertParallel, grouped_mm
from terrazzo.tensor.parallel.mixture import GroupedExperts, MixtureOfExperts
from terrazzo.tensor.parallel.parallelize import parallelize_module
from terrazzo.tensor.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from terrazzo.tensor.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "GroupedExperts",
    "MixtureOfExperts",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "grouped_mm",
    "loss_parallel",
    "parallelize_module",
]
