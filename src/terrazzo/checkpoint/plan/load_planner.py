"""The default load planner: which stored bytes go where in a state dict, worked out by each rank alone.

For every tensor of the state dict, the boxes that this rank holds are intersected with the boxes that are
stored.  All that does not fit (missing names, other shapes, dtypes that would lose digits) is collected
and raised as one error, before anything is changed.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from terrazzo._torch.groups import default_group, device_types
from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    is_tensor_entry,
)
from terrazzo.checkpoint.native.chunks import Overlaps
from terrazzo.checkpoint.native.dtypes import is_lossless
from terrazzo.checkpoint.native.objects import value_of
from terrazzo.checkpoint.plan.flatten import flatten_state_dict, set_element
from terrazzo.checkpoint.plan.per_rank import PerRank, name_on_rank
from terrazzo.checkpoint.plan.sharded import Viewer, is_sharded, local_chunks
from terrazzo.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from terrazzo.errors import CheckpointError, CheckpointMismatchError
from terrazzo.layout.box import Box

_NAMED = 50

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")


@dataclass(slots=True)
class _Faults:
    """What of the state dict does not fit the checkpoint."""

    missing: list[str]
    mismatched: list[str]


class DefaultLoadPlanner(LoadPlanner):
    """Plans loading into nested state dicts of tensors, distributed tensors and other values, in place.

    Every name of the state dict must be in the checkpoint, with the same shape and with a dtype whose values the
    state dict's dtype can all hold; all that does not fit is one error.  With `allow_partial_load`, names that
    the checkpoint lacks keep their values, and are listed in `missing` afterwards.  `allow_lossy_dtype` permits
    conversions that lose digits.  `allow_pickle` unpickles values that were stored as pickles: only for
    checkpoints that you trust, since unpickling can run code.  `flatten_sharded_tensors` is accepted for
    compatibility: sharded tensors of sharded tensors are always seen through.

    Values that were saved per rank (see `PerRank`) are recognised, and each rank gets its own.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_lossy_dtype: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.allow_lossy_dtype = allow_lossy_dtype
        self.allow_pickle = allow_pickle
        self.missing: tuple[str, ...] = ()
        self.rank = 0
        self.mappings: dict[str, tuple[Any, ...]] = {}
        self._targets: dict[MetadataIndex, torch.Tensor] = {}
        self._names: dict[str, str] = {}
        self._materialised: dict[str, torch.Tensor] = {}
        self._kept: list[str] = []

    @property
    def plans_alone(self) -> bool:
        """Whether the local plan is all there is: false when a subclass has a global step."""
        return type(self).create_global_plan is DefaultLoadPlanner.create_global_plan

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Learn this rank's place in the group, and the global ranks that make up the group."""
        self.rank = rank

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        self.mappings = {}
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        # A tensor without memory gets some: there is nothing to fill in place.
        self._materialised = {
            name: torch.empty_like(value, device=_device())
            for name, value in state_dict.items()
            if isinstance(value, torch.Tensor) and value.device.type == "meta"
        }
        state_dict.update(self._materialised)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise CheckpointError("the planner was set up without the checkpoint's metadata")
        stored = self.metadata.state_dict_metadata
        self._targets, self._names = {}, {}
        self._kept = []
        self._before = {n: value for n, value in self.state_dict.items() if n not in self._materialised}
        faults = _Faults([], [])
        items: list[ReadItem] = []
        with torch.no_grad():
            self._plan_values(stored, items, faults)
        self._report(faults, len(stored))
        return LoadPlan(items)

    def _plan_values(self, stored: Any, items: list[ReadItem], faults: _Faults) -> None:
        viewer, overlaps = Viewer(), Overlaps()
        for name, value in self.state_dict.items():
            entry = stored.get(name)
            # Most values are stored under their own names.
            source = (
                name if entry is not None and type(value) is not PerRank else self._stored_name(name, value, stored)
            )
            if source is None:
                if isinstance(value, PerRank) and name_on_rank(name, 0) in stored:
                    self._kept.append(name)  # saved by fewer ranks
                elif not (type(value) in (dict, list) and not value):  # an empty one asks for nothing
                    faults.missing.append(name)
                continue
            if isinstance(value, PerRank):
                value = value.value
            if source is not name:
                entry = stored[source]
            self._names[source] = name
            fault = self._fault(value, entry)
            if fault is not None:
                faults.mismatched.append(f"{name}: {fault}")
            elif is_tensor_entry(entry):
                items += self._tensor_items(name, source, value, entry, viewer, overlaps)
            else:
                index = MetadataIndex(source)
                none = torch.Size()
                items.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), none, index, none, none))

    def _stored_name(self, name: str, value: Any, stored: Any) -> str | None:
        """The name under which the checkpoint holds a value of the state dict."""
        if not isinstance(value, PerRank) and name in stored:
            return name
        own = name_on_rank(name, self.rank)
        if own in stored:
            return own
        # A value that is declared per rank now but was not when saved is the same for all.
        return name if isinstance(value, PerRank) and name in stored else None

    def _fault(self, value: Any, entry: Any) -> str | None:
        """Why a value cannot be loaded from an entry; None if it can."""
        is_tensor = isinstance(value, torch.Tensor) or is_sharded(value)
        if not is_tensor_entry(entry):
            return "the checkpoint holds an object, the state dict a tensor" if is_tensor else None
        if not is_tensor:
            return (
                f"the checkpoint holds a tensor of shape {list(entry.size)}, the state dict a {type(value).__name__}; "
                f"put a tensor of this shape there"
            )
        if value.size() != entry.size:
            return f"the checkpoint's shape is {list(entry.size)}, the state dict's is {list(value.size())}"
        dtype = entry.properties.dtype
        if dtype != value.dtype and not self.allow_lossy_dtype and not is_lossless(dtype, value.dtype):
            return f"{value.dtype} does not hold every value of the checkpoint's {dtype} (see allow_lossy_dtype)"
        return None

    def _report(self, faults: _Faults, stored: int) -> None:
        self.missing = tuple(faults.missing)
        lines = [f"{name}: not in the checkpoint" for name in faults.missing] if not self.allow_partial_load else []
        lines += faults.mismatched
        if lines:
            more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
            raise CheckpointMismatchError(
                f"{len(lines)} of {len(self.state_dict)} values of the state dict do not fit the checkpoint "
                f"(which has {stored}); nothing was loaded:\n  " + "\n  ".join(lines[:_NAMED]) + more,
                missing=self.missing,
                mismatched=tuple(faults.mismatched),
            )
        if self._kept:
            LOGGER.warning(
                "rank %d keeps its own %s: the checkpoint was saved by fewer ranks", self.rank, ", ".join(self._kept)
            )
        if self.missing:
            LOGGER.warning("kept as they were, for the checkpoint does not have them: %s", ", ".join(self.missing))

    def _tensor_items(
        self, name: str, source: str, value: Any, entry: TensorStorageMetadata, viewer: Viewer, overlaps: Overlaps
    ) -> list[ReadItem]:
        items = []
        for position, (box, target) in enumerate(local_chunks(name, value, viewer.view).chunks):
            dest_index = MetadataIndex(name, box.offsets, position)
            self._targets[dest_index] = target
            items += read_items(dest_index, source, box, entry, overlaps)
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = value_of(name, value, self.allow_pickle, "load with DefaultLoadPlanner(allow_pickle=True)")
        present = self.state_dict.get(name)
        if isinstance(present, PerRank):
            present.value = loaded
            return
        self.state_dict[name] = loaded
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor behind an index of this planner's plan."""
        return self._targets[index]

    def load_side(self) -> DefaultLoadPlanner:
        """How a load uses this planner: see `run.planner_sides`."""
        return self

    def own_target(self, item: ReadItem) -> torch.Tensor | None:
        """The tensor that an item fills; None when a subclass hands out others, or changes what was read."""
        kind = type(self)
        handed_out = all(
            getattr(kind, name) is getattr(DefaultLoadPlanner, name)
            for name in ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
        )
        return self.lookup_tensor(item.dest_index) if handed_out else None

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the local tensor that an item fills."""
        shape, lengths = tensor.shape, read_item.lengths
        if shape != lengths:
            for dim, length in enumerate(lengths):
                if shape[dim] != length:
                    tensor = tensor.narrow(dim, read_item.dest_offsets[dim], length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor was the state dict's own memory."""

    def forget(self) -> None:
        """Let go of the state dict, which a planner that is kept would keep alive."""
        self.state_dict, self.original_state_dict = {}, {}
        self._targets, self._before, self._materialised = {}, {}, {}
        self.metadata = None

    def write_back(self) -> None:
        """Put values that a subclass has exchanged in the flat state dict into the nested one."""
        for name, value in self.state_dict.items():
            if name in self.mappings and value is not self._before.get(name):
                set_element(self.original_state_dict, self.mappings[name], value)


def _device() -> torch.device:
    """Where tensors without memory get theirs: on the device that the process group is for, or else on the CPU."""
    if dist.is_available() and dist.is_initialized() and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and kind in (torch.device(device.type) for device in device_types(default_group())):
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def read_items(
    dest_index: MetadataIndex, source: str, box: Box, entry: TensorStorageMetadata, overlaps: Overlaps
) -> list[ReadItem]:
    """The items that fill `box` of the tensor stored as `source`."""
    coverage = overlaps.of(entry.chunks, box)
    if coverage.missing:
        raise CheckpointError(
            f"{source!r}: {coverage.missing} of the {box.numel} elements that are needed are not in the checkpoint, "
            f"which is incomplete"
        )
    return [
        ReadItem(
            LoadItemType.TENSOR,
            dest_index,
            found.in_box,
            MetadataIndex(source, found.chunk_offsets, found.number),
            found.in_chunk,
            found.lengths,
        )
        for found in coverage.parts
    ]
