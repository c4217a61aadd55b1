"""Distributed training state for PyTorch: tensors, sharding, checkpoints, and the engine that uses them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.graphs import compile, compile_report
    from terrazzo.integrations.installing import install, uninstall

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "compile_report", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    # These import torch, which a program that only asks for the version should not wait for.
    if name in ("compile", "compile_report"):
        return getattr(importlib.import_module("terrazzo.graphs"), name)
    if name in ("install", "uninstall"):
        return getattr(importlib.import_module("terrazzo.integrations.installing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
