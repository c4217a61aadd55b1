"""The training engine: ZeRO stages, mixed precision, and a run's whole state in one checkpoint.

The names are those of DeepSpeed's engine.
"""

from terrazzo.engine.api import initialize
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.engine import Engine
from terrazzo.engine.lr import WarmupCosineLR, WarmupDecayLR, WarmupLR
from terrazzo.engine.lr_cycles import LRRangeTest, OneCycle
from terrazzo.engine.sampler import ResumableSampler

__all__ = [
    "Engine",
    "EngineConfig",
    "LRRangeTest",
    "OneCycle",
    "ResumableSampler",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "initialize",
]
