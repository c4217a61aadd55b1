"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among the ranks.

The names and behaviours are those of `torch.distributed.fsdp.fully_shard`.
"""

from terrazzo.fsdp.api import fully_shard
from terrazzo.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from terrazzo.fsdp.report import GroupReport, Report, report
from terrazzo.fsdp.trace import Trace, TraceEvent, trace

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GroupReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Report",
    "Trace",
    "TraceEvent",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "report",
    "trace",
]
