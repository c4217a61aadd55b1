"""Composites taken apart by PyTorch's C++, which calls back with what they are made of (`dispatch.aten`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def run_composite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let C++ take `func` apart."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
