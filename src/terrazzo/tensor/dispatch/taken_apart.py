"""Composites taken apart by PyTorch's C++, which calls back with what they are made of (`dispatch.aten`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo._torch.dispatching import without_subclass_functions


def run_composite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let C++ take `func` apart."""
    with without_subclass_functions():
        return func(*args, **kwargs)
