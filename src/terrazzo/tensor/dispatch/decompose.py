"""Composites that PyTorch's C++ decomposes, calling back with their parts (`dispatch.aten`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo._torch.dispatching import without_subclass_functions


def run_composite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let C++ decompose `func`."""
    with without_subclass_functions():
        return func(*args, **kwargs)
