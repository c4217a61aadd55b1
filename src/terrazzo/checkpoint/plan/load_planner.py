"""The default load planner: which stored bytes fill which tensors of a state dict, planned by each rank alone.

For every tensor of the state dict, the boxes that this rank holds are intersected with the boxes that are
stored. All mismatches (missing names, other shapes, dtypes that would lose digits) are collected and raised as
one error, before anything is changed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import torch
import torch.distributed as dist

from terrazzo._meant import meant
from terrazzo._torch.groups import default_group, device_types
from terrazzo.checkpoint.formats.torch_archive import value_of
from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    is_tensor_entry,
)
from terrazzo.checkpoint.native.chunks import Overlap, complete_parts
from terrazzo.checkpoint.native.rows import ReadPlan, Target
from terrazzo.checkpoint.native.tensors import can_convert, fault_of, is_lossless
from terrazzo.checkpoint.plan.flatten import PerRank, check_names, flatten_state_dict, name_on_rank, set_element
from terrazzo.checkpoint.plan.sharded import ShardViews, global_size, is_sharded, plain_chunk
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.torch_api.items import is_unchanged, items_of, value_item
from terrazzo.errors import CheckpointError, CheckpointMismatchError, TerrazzoError, UnsupportedValueError
from terrazzo.layout.box import Box

_COMPARED = 3  # names that are compared with all stored ones
_NAMED = 50
# A subclass that changes one of these sees items, or makes other ones.
_SEES_ITEMS: Final = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_bytes",
    "resolve_tensor",
    "lookup_tensor",
    "transform_tensor",
    "commit_tensor",
)


class DefaultLoadPlanner(LoadPlanner):
    """Plans loading into nested state dicts of tensors, distributed tensors and other values, in place.

    Every name of the state dict must be in the checkpoint, with the same shape and with a dtype whose values the
    state dict's dtype can all hold; all mismatches are raised as one error. With `allow_partial_load`, names that
    the checkpoint lacks keep their values, and are listed in `missing` afterwards. `allow_lossy_dtype` permits
    conversions that lose digits. `allow_pickle` unpickles values that were stored as pickles: only for
    checkpoints that you trust, since unpickling can run code. `flatten_sharded_tensors` is accepted for
    compatibility: sharded tensors of sharded tensors are always supported.

    Values that were saved per rank (see `PerRank`) are recognised, and each rank gets its own.
    """

    original_state_dict: STATE_DICT_TYPE
    mappings: dict[str, tuple[Any, ...]]

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
        self.original_state_dict = {}
        self.mappings = {}
        self._targets: dict[MetadataIndex, torch.Tensor] = {}  # only if items are wanted
        self._materialised: dict[str, torch.Tensor] = {}
        self._kept: list[str] = []

    @property
    def plans_alone(self) -> bool:
        """Whether the local plan is all there is: false when a subclass has a global step."""
        return type(self).create_global_plan is DefaultLoadPlanner.create_global_plan

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Set this rank's number in the group, and the global ranks of the group."""
        self.rank = rank

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        self.mappings = {}
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        else:
            check_names(state_dict)
        # A tensor without memory gets memory, because there is nothing to fill in place.
        self._materialised = {
            name: torch.empty_like(value, device=_device())
            for name, value in state_dict.items()
            if isinstance(value, torch.Tensor) and value.device.type == "meta"  # a ShardedTensor has no is_meta
        }
        state_dict.update(self._materialised)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = self._planned()
        self._targets = {}
        items: list[ReadItem] = []
        for target in plan.targets:
            index = MetadataIndex(target.name, target.box.offsets, target.number)
            self._targets[index] = target.tensor
            items += items_of(index, target.source, target.parts)
        return LoadPlan(items + [value_item(name, source) for name, source in plan.values])

    def read_plan(self) -> ReadPlan | None:
        """The local plan in the library's own form; None if a subclass makes, sees or changes items."""
        return self._planned() if is_unchanged(self, DefaultLoadPlanner, _SEES_ITEMS) else None

    @torch.no_grad()
    def _planned(self) -> ReadPlan:
        if self.metadata is None:
            raise CheckpointError("the planner was set up without the checkpoint's metadata")
        stored = self.metadata.state_dict_metadata
        self._kept = []
        self._before = dict(self.state_dict)
        for name in self._materialised:
            del self._before[name]
        missing: list[str] = []
        mismatched: list[str] = []
        targets: list[Target] = []
        values: list[tuple[str, str]] = []
        viewer = ShardViews()
        # By the box and the entry themselves (kept, so that their ids stay theirs), which tensors that are alike share.
        known: dict[tuple[int, int], tuple[tuple[Overlap, ...], Box, Any]] = {}
        name, value = "", None
        try:
            for name, value in self.state_dict.items():
                entry = stored.get(name)
                source = name
                if entry is None or type(value) is PerRank:  # most values are stored under their own names
                    own = name_on_rank(name, self.rank)
                    if own in stored:
                        source, entry = own, stored[own]
                    elif entry is None:
                        if isinstance(value, PerRank) and name_on_rank(name, 0) in stored:
                            self._kept.append(name)  # saved by fewer ranks
                        elif not (type(value) in (dict, list) and not value):  # an empty tensor needs nothing
                            missing.append(name)
                        continue
                    # A value that is declared per rank now but was not when saved is the same for all.
                    if isinstance(value, PerRank):
                        value = value.value
                sharded = is_sharded(value)
                if not (sharded or isinstance(value, torch.Tensor)):
                    if is_tensor_entry(entry):
                        mismatched.append(
                            f"{name}: the checkpoint holds a tensor of shape {list(entry.size)}, the state dict a "
                            f"{type(value).__name__}; put a tensor of this shape there"
                        )
                    else:
                        values.append((name, source))
                elif type(entry) is not TensorStorageMetadata and not is_tensor_entry(entry):  # PyTorch's class
                    why = "the checkpoint holds an object, the state dict a tensor: put a plain value there"
                    mismatched.append(f"{name}: {why}")
                else:
                    local = sharded and not hasattr(value, "device_mesh")  # its own shape may be that of its part
                    fault = self._fault(global_size(value) if local else value.size(), value.dtype, entry)
                    if fault is not None:
                        mismatched.append(f"{name}: {fault}")
                        continue
                    chunks = viewer.view(name, value).chunks if sharded else (plain_chunk(name, value),)
                    for number, (box, tensor) in enumerate(chunks):
                        key = id(box), id(entry)
                        alike = known.get(key)
                        if alike is None:
                            alike = known[key] = complete_parts(source, entry.chunks, box), box, entry
                        targets.append(Target(name, source, tensor, box, alike[0], number))
        except (RuntimeError, ValueError) as error:  # of tensors whose shape cannot be asked for
            fault = "" if isinstance(error, TerrazzoError) or not isinstance(value, torch.Tensor) else fault_of(value)
            if not fault:
                raise
            raise UnsupportedValueError(f"{name!r}: {fault}") from error
        self._report(missing, mismatched, stored)
        return ReadPlan(targets, values)

    def _fault(self, size: torch.Size, dtype: torch.dtype, entry: TensorStorageMetadata) -> str | None:
        """Why a tensor cannot be loaded from an entry; None if it can."""
        if size != entry.size:
            said = f"Size mismatch between saved {entry.size} and current: {size}"  # by PyTorch
            return f"the checkpoint's shape is {list(entry.size)}, the state dict's is {list(size)} ({said})"
        stored = entry.properties.dtype
        if stored is dtype:
            return None
        if not can_convert(stored, dtype):
            return f"torch cannot convert the checkpoint's {stored} to {dtype}; load it as {stored}"
        if not self.allow_lossy_dtype and not is_lossless(stored, dtype):
            return (
                f"{dtype} does not hold every value of the checkpoint's {stored}; to round them, pass "
                "planner=DefaultLoadPlanner(allow_lossy_dtype=True)"
            )
        return None

    def _renamed(self, name: str, stored: Mapping[str, Any]) -> str:
        """The end of a message about a missing tensor: which stored one of its shape it may be under another name."""
        size, own = getattr(self.state_dict[name], "shape", None), name.split(".")[::-1]

        def alike(other: str) -> int:
            pairs = zip(own, other.split(".")[::-1], strict=False)
            return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

        free = (
            each for each, entry in stored.items() if each not in self.state_dict and getattr(entry, "size", 0) == size
        )
        other = max(free, key=alike, default="")
        if not other or not alike(other):
            return ""
        return f"; {other} has this shape, and nothing asks for it: if it is the same, load it under that name"

    def _report(self, missing: Sequence[str], mismatched: Sequence[str], stored: Mapping[str, Any]) -> None:
        self.missing = tuple(missing)
        missing = () if self.allow_partial_load else missing
        # In brackets what PyTorch says, which programs look for.
        lines = [
            f"{name}: not in the checkpoint (Missing key in checkpoint state_dict: {name}.)"
            f"{meant(name, stored, self._renamed(name, stored)) if number < _COMPARED else ''}"
            for number, name in enumerate(missing)
        ]
        lines += mismatched
        if lines:
            more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
            raise CheckpointMismatchError(
                f"{len(lines)} of {len(self.state_dict)} values of the state dict do not fit the checkpoint "
                f"(which has {len(stored)}); nothing was loaded:\n  " + "\n  ".join(lines[:_NAMED]) + more,
                missing=self.missing,
                mismatched=tuple(mismatched),
            )
        if self._kept:
            LOGGER.warning(
                "rank %d keeps its own %s: the checkpoint was saved by fewer ranks", self.rank, ", ".join(self._kept)
            )
        if self.missing:
            LOGGER.warning("not in the checkpoint, so these keep their values: %s", ", ".join(self.missing))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put_value(read_item.dest_index.fqn, value)

    def put_value(self, name: str, value: io.BytesIO) -> None:
        """Put a value that has been read into the state dict."""
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

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the local tensor that an item fills."""
        if tensor.shape == read_item.lengths:
            return tensor
        return tensor[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices()]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor was the state dict's own memory."""

    def forget(self) -> None:
        """Drop the references to the state dict, which a planner that is kept would keep alive."""
        self.state_dict, self.original_state_dict = {}, {}
        self._targets, self._before, self._materialised = {}, {}, {}
        self.metadata = None

    def write_back(self) -> None:
        """Put values that a subclass has exchanged in the flat state dict into the nested one."""
        for name, value in self.state_dict.items():
            if name in self.mappings and value is not self._before.get(name):
                set_element(self.original_state_dict, self.mappings[name], value)


def _device() -> torch.device:
    """The device for tensors without memory: the accelerator that the process group is for, or else the CPU."""
    if dist.is_available() and dist.is_initialized() and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and kind in (torch.device(device.type) for device in device_types(default_group())):
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
