"""Pipelines: a model as a sequence of layers, cut into stages."""

from terrazzo.deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from terrazzo.deepspeed.pipe.topology import PipeDataParallelTopology, ProcessTopology

__all__ = ["LayerSpec", "PipeDataParallelTopology", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
