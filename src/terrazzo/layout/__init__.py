"""The maths of who holds what, without any communication: boxes, placements, layouts, transitions."""

from terrazzo.layout.box import Box, boxes_of_flat_range
from terrazzo.layout.chunking import chunk_sizes, chunk_span
from terrazzo.layout.layout import Layout
from terrazzo.layout.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from terrazzo.layout.transition import moved_bytes, plan_transition

__all__ = [
    "REDUCE_OPS",
    "Box",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "boxes_of_flat_range",
    "chunk_sizes",
    "chunk_span",
    "moved_bytes",
    "plan_transition",
]
