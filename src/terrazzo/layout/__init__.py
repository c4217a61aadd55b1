"""Which rank holds which part of a tensor, as pure data: boxes, placements, layouts, transitions. No communication."""

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.layout.box import Box, boxes_of_flat_range
    from terrazzo.layout.cells import (
        cells_in,
        coordinates_of_all_shapes,
        first_holders,
        leaves_a_rank_empty,
        replicas,
    )
    from terrazzo.layout.chunking import chunk_sizes, chunk_span
    from terrazzo.layout.grid import Grid, grid_of
    from terrazzo.layout.layout import Layout
    from terrazzo.layout.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
    from terrazzo.layout.transition import moved_bytes, plan_transition

__all__ = [
    "REDUCE_OPS",
    "Box",
    "Grid",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "boxes_of_flat_range",
    "cells_in",
    "chunk_sizes",
    "chunk_span",
    "coordinates_of_all_shapes",
    "first_holders",
    "grid_of",
    "leaves_a_rank_empty",
    "moved_bytes",
    "plan_transition",
    "replicas",
]

__getattr__, __dir__ = late(__name__, ["chunk", "drawing"])
