"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among the ranks.

The names and behaviours are those of `torch.distributed.fsdp.fully_shard`.
"""

from terrazzo.comm.codecs import MXFP8, NVFP4, Codec, Float8Rows, Int8Blocks
from terrazzo.fsdp.api import fully_shard
from terrazzo.fsdp.explain import explain
from terrazzo.fsdp.meshes import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from terrazzo.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from terrazzo.fsdp.pipelining import register_fsdp_pipeline_stage
from terrazzo.fsdp.plan.operations import Operation
from terrazzo.fsdp.plan.step import Plan
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from terrazzo.fsdp.report import GroupReport, Report, report
from terrazzo.fsdp.settings import AllGather, ReduceScatter
from terrazzo.fsdp.timeline import Collective, Timeline, timeline
from terrazzo.fsdp.trace import Trace, trace

__all__ = [
    "MXFP8",
    "NVFP4",
    "AllGather",
    "CPUOffloadPolicy",
    "Codec",
    "Collective",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "Float8Rows",
    "GroupReport",
    "HSDPMeshInfo",
    "Int8Blocks",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Operation",
    "Plan",
    "ReduceScatter",
    "Report",
    "ShardPlacementResult",
    "Timeline",
    "Trace",
    "UnshardHandle",
    "explain",
    "fully_shard",
    "register_fsdp_forward_method",
    "register_fsdp_pipeline_stage",
    "report",
    "share_comm_ctx",
    "timeline",
    "trace",
]
