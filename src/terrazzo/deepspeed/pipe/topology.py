"""The places of ranks along named axes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from math import prod
from typing import Any

import torch.distributed as dist

from terrazzo.errors import EngineConfigError
from terrazzo.layout.drawing import ShownAsCall

_named: Any = namedtuple  # not for type checkers: the names are known when it is called


class ProcessTopology(ShownAsCall):
    """Ranks along named axes; the last axis varies fastest.

    >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 2])
    >>> topology.get_rank(pipe=1, data=0), topology.get_coord(3)
    (2, ProcessCoord(pipe=1, data=1))
    >>> topology.get_axis_comm_lists("data")
    [[0, 1], [2, 3]]
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = _named("ProcessCoord", self.axes)

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
            if axis not in coordinates:
                raise EngineConfigError(f"get_rank needs the coordinate {axis}: filter_match takes only some")
            rank = rank * size + coordinates[axis]
        return rank

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, a named tuple."""
        found = []
        for size in reversed(self.dims):
            rank, position = divmod(rank, size)
            found.append(position)
        return self.ProcessCoord(*reversed(found))

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, by axis."""
        return dict(zip(self.axes, self.get_coord(rank), strict=True))

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks that have these coordinates."""
        return [r for r in range(self.world_size()) if coordinates.items() <= self.place(r).items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at this position of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ only along an axis, for each place along the others; empty if there is no such axis."""
        if axis not in self.axes:
            return []
        firsts = [self.place(rank) for rank in self.get_axis_list(axis, 0)]
        return [[self.get_rank(**{**first, axis: i}) for i in range(self.get_dim(axis))] for first in firsts]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinates as text, without some axes, for the names of files."""
        kept = {axis: at for axis, at in self.place(rank).items() if axis not in omit_axes}
        return outer_sep.join(f"{axis}{inner_sep}{at:02d}" for axis, at in kept.items())


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each trained by ranks that see different data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline of which several ranks hold parts, each trained by ranks that see different data."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid(ShownAsCall):
    """This rank's place in a topology of all ranks, and its process groups; all ranks make it together."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        size = dist.get_world_size()
        self._topo = topology if topology is not None else PipeDataParallelTopology(size, 1)
        if self._topo.world_size() != size:
            raise EngineConfigError(f"the topology is for {self._topo.world_size()} ranks, but there are {size}")
        self.global_rank, self.world_size = dist.get_rank(), size
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id = self.get_stage_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.pp_proc_group = self._group("pipe")
        self.dp_group, self.dp_proc_group = self._group("data")
        self.slice_group, self.slice_proc_group = self._group("model")

    def _group(self, axis: str) -> tuple[list[int], Any]:
        """This rank's own ranks along an axis, and their process group."""
        lists = self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
        groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
        return next((ranks, group) for ranks, group in groups if self.global_rank in ranks)

    def _position(self, axis: str) -> int:
        return self._topo.place(self.global_rank).get(axis, 0)

    @property
    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def _is_grid_valid(self) -> bool:
        return self.pipe_parallel_size * self.data_parallel_size * self.model_parallel_size == self.world_size

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """The rank of another stage at this rank's place along the other axes, or at `others`."""
        here = self._topo.place(self.global_rank)
        return self._topo.get_rank(**{**here, **others, "pipe": stage_id})

    def get_global_rank(self) -> int:
        """This rank's number among all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self._position("pipe")

    def get_data_parallel_id(self) -> int:
        """This rank's number among those that see different data."""
        return self._position("data")

    def get_pipe_parallel_group(self) -> Any:
        """The process group of the stages."""
        return self.pp_proc_group

    def get_data_parallel_group(self) -> Any:
        """The process group of the ranks that see different data."""
        return self.dp_proc_group

    def get_model_parallel_group(self) -> Any:
        """The process group of the ranks that hold parts of one stage."""
        return self.slice_proc_group

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_data_parallel_world_size(self) -> int:
        """The number of ranks that see different data."""
        return self.data_parallel_size

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that hold parts of one stage."""
        return self.model_parallel_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that hold parts of one stage."""
        return self._position("model")

    get_pipe_parallel_rank, get_data_parallel_rank = get_stage_id, get_data_parallel_id
    get_slice_parallel_rank, get_slice_parallel_group = get_model_parallel_rank, get_model_parallel_group
    get_slice_parallel_world_size = get_model_parallel_world_size
