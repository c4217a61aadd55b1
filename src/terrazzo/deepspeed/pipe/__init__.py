"""Pipelines: a model as a sequence of layers, cut into stages."""

from terrazzo.deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from terrazzo.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
