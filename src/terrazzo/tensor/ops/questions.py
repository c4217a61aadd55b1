"""What several rules ask about operands and indices, and how they get operands whose parts are boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo._torch.tensors import assert_async
from terrazzo.comm.captured import capturing
from terrazzo.layout import Layout, Partial, Replicate, Shard
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.redistribute import boxes_of, redistribute_local


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


def without_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout of a result without these dims: replicated where they were sharded."""
    kept = [d for d in range(layout.ndim) if d not in dims]
    placements = [
        p if not isinstance(p, Shard) else Shard(kept.index(p.dim)) if p.dim in kept else Replicate()
        for p in layout.placements
    ]
    return Layout.of(layout.mesh, placements, [layout.shape[d] for d in kept], layout.order)


def in_boxes(x: Any) -> DTensor:
    """`x` in such a layout, redistributed if it has to be."""
    layout = x._layout
    plain = boxes_of(layout) if layout.packed else layout.dual
    return x if plain is layout else wrap(redistribute_local(x._local, layout, plain), plain)


def check_bounds(values: torch.Tensor, count: int, what: str) -> None:
    """Raise for values outside [0, count); on an accelerator through an assertion that needs no synchronisation.

    For where each rank only looks up its own part: an index that is in no rank's part would give zero on every rank, so
    the sum would be a wrong but plausible number.

    >>> check_bounds(torch.tensor([0, 3]), 3, "target")
    Traceback (most recent call last):
    IndexError: target 3 is out of bounds: there are 3
    """
    if capturing():
        return  # while a graph is captured there are no values to check
    inside = ((values >= 0) & (values < count)).all()
    if values.device.type != "cpu":
        assert_async(inside, f"{what} out of bounds")
    elif not inside:
        wrong = values[(values < 0) | (values >= count)]
        raise IndexError(f"{what} {wrong.flatten()[0].item()} is out of bounds: there are {count}")
