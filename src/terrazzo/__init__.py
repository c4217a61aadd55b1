"""Distributed training state for PyTorch: tensors, sharding, checkpoints, and the engine that uses them."""

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.graphs import compile, compile_report
    from terrazzo.integrations.installing import install, uninstall

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "compile_report", "install", "uninstall"]

_PACKAGES = ("checkpoint", "comm", "deepspeed", "engine", "errors", "fsdp", "launch", "layout", "notebook", "optim",
             "publish", "tensor", "testing", "view")  # fmt: skip

# `import terrazzo` imports none of them, nor PyTorch; `terrazzo.tensor` does, when a program first says it.
__getattr__, __dir__ = late(__name__, _PACKAGES)
