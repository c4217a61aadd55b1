"""The places of ranks along named axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


class ProcessTopology:
    """Ranks along named axes; the last axis varies fastest.

    >>> ProcessTopology(axes=["pipe", "data"], dims=[2, 2]).get_rank(pipe=1, data=0)
    2
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)

    def get_axis_names(self) -> list[str]:
        """The names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.dims)

    def get_rank(self, **coordinates: int) -> int:
        """The rank at these coordinates."""
        rank = 0
        for axis, size in zip(self.axes, self.dims, strict=True):
            rank = rank * size + coordinates[axis]
        return rank


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each trained by ranks that see different data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])
