"""The coordinator's planning, if a planner or a storage needs the plans of all ranks.

It is not used for planners with the default global step: see `ownership`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.merging import refuse_gaps
from terrazzo.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from terrazzo.errors import CheckpointError


def deduplicated(plans: Sequence[SavePlan], *, lowest_rank: bool) -> list[SavePlan]:
    """The plans with each item in one plan only: that of the lowest rank, or of the one with fewest bytes so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = holders.setdefault(item.index, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
            items.setdefault(item.index, item)
    sizes = {index: item.tensor_storage_size() or 0 for index, item in items.items()}
    loads = [0] * len(plans)
    owner: dict[MetadataIndex, int] = {}
    for index, ranks in holders.items():
        if len(ranks) == 1 or lowest_rank or items[index].type is WriteItemType.BYTE_IO:
            owner[index] = ranks[0]
            loads[ranks[0]] += sizes[index]
    for index in sorted((i for i in holders if i not in owner), key=lambda i: -sizes[i]):
        rank = min(holders[index], key=lambda r: (loads[r], r))
        owner[index] = rank
        loads[rank] += sizes[index]
    return [
        replace(plan, items=list({item.index: item for item in plan.items if owner[item.index] == rank}.values()))
        for rank, plan in enumerate(plans)
    ]


def merged_metadata(plans: Sequence[SavePlan]) -> Metadata:
    """The metadata of the checkpoint that these plans write."""
    entries = merged_entries([(item.index.fqn, item.tensor_data) for item in plan.items] for plan in plans)
    return Metadata(entries, planner_data=merged_planner_data([plan.planner_data for plan in plans]))


def merged_entries(parts: Iterable[Iterable[tuple[str, TensorWriteData | None]]]) -> dict[str, STORAGE_TYPES]:
    """What is stored under each name, from the chunks of tensors (None: other values) that each rank writes.

    Raises unless the chunks make up each tensor.
    """
    entries: dict[str, STORAGE_TYPES] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    for rank, part in enumerate(parts):
        for name, data in part:
            known = entries.get(name)
            if data is None:
                if known is not None:
                    raise CheckpointError(f"{name!r} would be written twice, or as an object and as a tensor")
                entries[name] = BytesStorageMetadata()
                continue
            if known is None:
                chunks[name] = []
                known = entries[name] = TensorStorageMetadata(data.properties, data.size, chunks[name])
            if not isinstance(known, TensorStorageMetadata) or known.size != data.size:
                raise CheckpointError(f"{name!r} differs between rank {rank} and a lower rank")
            if known.properties.dtype != data.properties.dtype:
                raise CheckpointError(
                    f"{name!r} is {data.properties.dtype} on rank {rank} and {known.properties.dtype} on a lower rank"
                )
            chunks[name].append(data.chunk)
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    refuse_gaps({name: (entry.size, [chunk.box for chunk in chunks[name]]) for name, entry in tensors.items()})
    return entries


def merged_planner_data(data: Sequence[Any]) -> dict[str, Any] | None:
    """The paths of all ranks' names. A subclass that adds other planner data must merge them itself."""
    merged: dict[str, Any] = {}
    for part in data:
        if isinstance(part, dict):
            merged.update(part)
    return merged or None
