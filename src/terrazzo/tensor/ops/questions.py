"""Questions about operands that several rules ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.layout import Partial, Shard
from terrazzo.tensor.dtensor import DTensor


def is_sharded_along(x: Any, dims: Sequence[int]) -> bool:
    """Whether several ranks hold different parts along `dims`. For DTensors and operands."""
    layout = x._layout if isinstance(x, DTensor) else x.layout
    return any(
        isinstance(p, Shard) and p.dim in dims and n > 1
        for p, n in zip(layout.placements, layout.mesh_shape, strict=True)
    )


def is_cut(x: Any, dims: Sequence[int]) -> bool:
    """Whether it is partial, or several ranks hold different parts along `dims`: then no rank can compute alone."""
    layout = x._layout if isinstance(x, DTensor) else x.layout
    return is_sharded_along(x, dims) or any(
        isinstance(p, Partial) and n > 1 for p, n in zip(layout.placements, layout.mesh_shape, strict=True)
    )
