"""DeepSpeed's API on top of `terrazzo.engine`: a script runs with `import terrazzo.deepspeed as deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, training_data=data)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Names, arguments and results are DeepSpeed's; `terrazzo.engine` does the work.
"""

from typing import Any

from terrazzo.deepspeed import checkpoint, checkpointing, comm, moe, ops, pipe, runtime, utils, zero
from terrazzo.deepspeed.accelerator import get_accelerator
from terrazzo.deepspeed.api import add_config_arguments, initialize
from terrazzo.deepspeed.comm import init_distributed
from terrazzo.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader
from terrazzo.deepspeed.engine import DeepSpeedEngine
from terrazzo.deepspeed.git_version_info import git_branch, git_hash, version
from terrazzo.deepspeed.installing import install
from terrazzo.deepspeed.optimizer import DeepSpeedOptimizer
from terrazzo.deepspeed.pipe import PipelineModule
from terrazzo.deepspeed.pipe.engine import PipelineEngine
from terrazzo.deepspeed.runtime.config import DeepSpeedConfig
from terrazzo.deepspeed.submodules import ABSENT, register
from terrazzo.deepspeed.utils import OnDevice, log_dist, logger
from terrazzo.errors import EngineConfigError as DeepSpeedConfigError

__version__ = version
"""The DeepSpeed version whose API this is."""
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))
__git_hash__, __git_branch__ = git_hash, git_branch

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "RepeatingLoader",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

register(__name__)


def __getattr__(name: str) -> Any:
    why = f": {ABSENT[name]}" if name in ABSENT else "; docs/deepspeed.md lists the names that it has"
    raise AttributeError(f"terrazzo.deepspeed has no {name}{why}")
