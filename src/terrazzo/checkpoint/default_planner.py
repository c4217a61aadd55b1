"""The default planners, and their steps as functions for custom planners."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, is_tensor_entry
from terrazzo.checkpoint.native.tensors import empty
from terrazzo.checkpoint.plan.flatten import flatten_state_dict, set_element
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.plan.save_planner import DefaultSavePlanner
from terrazzo.checkpoint.plan.sharded import flatten_sharded_tensors as _flatten_sharded_tensors
from terrazzo.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from terrazzo.checkpoint.torch_api.items import merged_metadata
from terrazzo.errors import CheckpointError

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "_flatten_sharded_tensors",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "flatten_state_dict",
    "set_element",
]


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Loads into an empty state dict what the checkpoint holds: all, or what lies under `keys`.

    PyTorch's planner of this name, which libraries use to load whole checkpoints.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = keys

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if state_dict or metadata is None:
            raise CheckpointError(f"{type(self).__name__} needs an empty state dict, and the checkpoint's metadata")
        paths: Any = metadata.planner_data or {}
        wanted = None if self.keys is None else set(self.keys)
        for name, entry in metadata.state_dict_metadata.items():
            path = paths.get(name) or (name,)
            above = {".".join(map(str, path[:count])) for count in range(1, len(path) + 1)}
            if wanted is None or name in wanted or above & wanted:
                value = empty(name, entry.size, entry.properties.dtype) if is_tensor_entry(entry) else None
                set_element(state_dict, path, value)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:
    """A plan with everything in a flat state dict that this rank could write."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
    return planner.create_local_plan()


def create_default_global_save_plan(
    all_plans: Sequence[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The plans, unchanged, and the checkpoint's metadata. Each value must be in one plan only.

    With `rewrite_index_hints` the `index` of each chunk is set to its position in the metadata.
    """
    metadata = merged_metadata(all_plans)
    if not rewrite_index_hints:
        return list(all_plans), metadata
    counts: dict[str, int] = {}
    return [replace(plan, items=[_hinted(item, counts) for item in plan.items]) for plan in all_plans], metadata


def _hinted(item: WriteItem, counts: dict[str, int]) -> WriteItem:
    if item.type is WriteItemType.BYTE_IO:
        return item
    name = item.index.fqn
    number = counts[name] = counts.get(name, -1) + 1
    return replace(item, index=MetadataIndex(name, item.index.offset, number))


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """The plan that fills a flat state dict. Without `strict`, keys that the checkpoint lacks are left out."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict)
    planner.set_up_planner(state_dict, metadata)
    return planner.create_local_plan()


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """The plans, unchanged."""
    return all_plans
