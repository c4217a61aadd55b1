"""PyTorch's items, where saves and loads meet them: as rows to write, and as targets to read into.

If a planner has a global step of its own, the coordinator gets the plans of all ranks as items; else see
`plan.ownership`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from terrazzo.checkpoint.native.chunks import Overlap, complete_parts
from terrazzo.checkpoint.native.containers import Paths, forms_of, merged_forms
from terrazzo.checkpoint.native.merging import refuse_gaps
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.root import RAW, TENSOR, TYPED
from terrazzo.checkpoint.native.rows import NO_FORM, Form, Row, Target, form_of, object_row
from terrazzo.checkpoint.native.tensors import as_bytes, can_convert, empty, fault_of
from terrazzo.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box

_THEIRS: Final = "torch.distributed.checkpoint.default_planner"
AT_ONCE: Final = 32 << 20  # bytes of tensors that are read into memory of their own together


def is_unchanged(one: object, base: type, names: Iterable[str]) -> bool:
    """Whether an object has these methods from `base`: neither its class nor the object itself has others."""
    return all(getattr(type(one), name) is getattr(base, name) and name not in vars(one) for name in names)


def rows_of(items: Sequence[WriteItem], planner: SavePlanner | None = None) -> list[Row]:
    """PyTorch's items as rows; the planner is asked for the data of a tensor when it is written.

    Without a planner rows have no data, and those of values no size.
    """
    tied_to = getattr(planner, "tied_to", None)
    # Many items share one description; the items keep it alive, and with it its id.
    forms: dict[int, Form] = {}
    rows = []
    for item in items:
        name = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            row = Row(name, NO_FORM, kind=TYPED) if planner is None else object_row(name, *_payload(planner, item))
            rows.append(msgspec.structs.replace(row, key=item.index))
            continue
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{name!r}: an item of type {item.type} needs tensor_data")
        form = forms.get(id(data))
        if form is None:
            form = forms[id(data)] = form_of(data.properties.dtype, tuple(data.size), data.chunk.box)
        tied = None if tied_to is None else tied_to(item.index)
        source = None if planner is None else partial(data_of, planner, item)
        rows.append(Row(name, form, key=item.index, tied=tied, source=source))
    return rows


def item_of(row: Row, described: dict[int, TensorWriteData]) -> WriteItem:
    """A row as PyTorch's item; rows of one form share their description."""
    form = row.form
    if row.kind != TENSOR:
        return WriteItem(MetadataIndex(row.name), WriteItemType.BYTE_IO)
    data = described.get(id(form))
    if data is None:
        chunk = ChunkStorageMetadata(torch.Size(form.box.offsets), torch.Size(form.box.lengths))
        properties = TensorProperties(form.dtype, requires_grad=form.requires_grad)
        data = described[id(form)] = TensorWriteData(chunk, properties, torch.Size(form.shape))
    kind = WriteItemType.TENSOR if form.box.lengths == form.shape else WriteItemType.SHARD
    return WriteItem(MetadataIndex(row.name, data.chunk.offsets), kind, tensor_data=data)


def _payload(planner: SavePlanner, item: WriteItem) -> tuple[int, bytes | ObjectBytes]:
    data = planner.resolve_data(item)
    if isinstance(data, ObjectBytes):
        return TYPED, data
    if isinstance(data, torch.Tensor):
        raise CheckpointError(
            f"{item.index.fqn!r}: the plan promised bytes, but the planner's resolve_data gave a tensor"
        )
    return RAW, data.getvalue()


def data_of(planner: SavePlanner, item: WriteItem) -> Any:
    """What the planner's `resolve_data` returns for an item; raises an error for a tensor without memory."""
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        fault = fault_of(data)
        if fault:
            raise UnsupportedValueError(f"{item.index.fqn!r}: what the planner's resolve_data returned: {fault}")
    return data


def items_of(dest_index: MetadataIndex, source: str, parts: Sequence[Overlap]) -> list[ReadItem]:
    """The parts that a target needs, as PyTorch's items."""
    return [
        ReadItem(
            LoadItemType.TENSOR,
            dest_index,
            torch.Size(part.in_box),
            MetadataIndex(source, part.chunk.offsets, part.number),
            torch.Size(part.in_chunk),
            torch.Size(part.lengths),
        )
        for part in parts
    ]


def value_item(name: str, source: str) -> ReadItem:
    """A value that is not a tensor, as PyTorch's item."""
    none = torch.Size()
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), none, MetadataIndex(source), none, none)


def fill_items(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    entry_of: Callable[[str], TensorStorageMetadata],
    fill: Callable[[Sequence[Target]], None],
    at_once: float = AT_ONCE,
) -> None:
    """Fill the tensors that a planner returns for items, by a reader's `fill`.

    PyTorch's readers call `resolve_tensor`, fill the tensor and call `commit_tensor` before they go on to the next one,
    so a planner may keep in between what it needs at the end. Here tensors are read into memory first, up to `at_once`
    bytes together; then the planner is called for each. A larger tensor is read by itself into the planner's memory.
    """
    for group, is_large in _groups(items, entry_of, at_once):
        targets = [_target_of(item, entry_of(item.storage_index.fqn), planner if is_large else None) for item in group]
        fill(targets)
        for item, target in zip(group, targets, strict=True):
            resolved = target.tensor
            if not is_large:
                resolved = _resolved(planner, item)
                _check_convertible(item, target.tensor.dtype, resolved.dtype)
                as_bytes(resolved).copy_(as_bytes(target.tensor))
            planner.commit_tensor(item, resolved)


def _groups(
    items: Sequence[ReadItem], entry_of: Callable[[str], TensorStorageMetadata], at_once: float
) -> Iterator[tuple[list[ReadItem], bool]]:
    """The items in lists of at most so many bytes, and whether it is one that has more."""
    group: list[ReadItem] = []
    total = 0
    for item in items:
        nbytes = prod(item.lengths) * entry_of(item.storage_index.fqn).properties.dtype.itemsize
        if group and total + nbytes > at_once:
            yield group, False
            group, total = [], 0
        if nbytes > at_once:
            yield [item], True
            continue
        group.append(item)
        total += nbytes
    if group or not items:  # a reader whose ranks read together is called on all of them
        yield group, False


def _target_of(item: ReadItem, entry: TensorStorageMetadata, planner: LoadPlanner | None) -> Target:
    """An item as a target: memory of the planner, or without one new memory."""
    index, lengths = item.storage_index, tuple(item.lengths)
    box = Box(tuple(item.storage_offsets), lengths)
    if index.offset is not None:
        box = box.shifted(tuple(index.offset))
    if planner is None:
        memory = empty(index.fqn, lengths, entry.properties.dtype)
    else:
        memory = _resolved(planner, item)
        _check_convertible(item, entry.properties.dtype, memory.dtype)
    return Target(item.dest_index.fqn, index.fqn, memory, box, complete_parts(index.fqn, entry.chunks, box))


def _resolved(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """What the planner's `resolve_tensor` returns for an item; raises an error if it cannot be filled."""
    name, target = item.dest_index.fqn, planner.resolve_tensor(item).detach()
    if target.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device, which holds no values; give it memory first, or load with a planner "
            f"whose resolve_tensor does"
        )
    fault = fault_of(target)
    if fault:
        raise UnsupportedValueError(f"{name!r}: what the planner's resolve_tensor returned: {fault}")
    if target.shape != tuple(item.lengths):
        raise CheckpointError(
            f"{name!r}: the planner's resolve_tensor returned a tensor of shape {list(target.shape)} for "
            f"{list(item.lengths)}"
        )
    return target


def _check_convertible(item: ReadItem, stored: torch.dtype, wanted: torch.dtype) -> None:
    if not can_convert(stored, wanted):
        raise CheckpointError(
            f"{item.dest_index.fqn!r}: torch cannot convert the checkpoint's {stored} to {wanted}, the dtype of what "
            f"the planner's resolve_tensor returned"
        )


def check_planner(planner: object) -> None:
    """Raise for a planner that is built on PyTorch's default planners: its plans are PyTorch's, not terrazzo's."""
    for kind in type(planner).__mro__:
        if kind.__module__ == _THEIRS and kind.__qualname__ in ("DefaultSavePlanner", "DefaultLoadPlanner"):
            own = type(planner)
            raise CheckpointError(
                f"the planner {own.__module__}.{own.__qualname__} is PyTorch's {kind.__qualname__} or built on it; "
                f"change the import: from terrazzo.checkpoint import {kind.__qualname__}"
            )


# ------------------------------------------------------------------ the coordinator's plan of all ranks


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
    for index, item in items.items():
        if lowest_rank or item.type is WriteItemType.BYTE_IO:
            del holders[index][1:]
    for index in sorted(holders, key=lambda i: (len(holders[i]) > 1, -sizes[i])):  # first those without a choice
        owner[index] = min(holders[index], key=lambda r: (loads[r], r))
        loads[owner[index]] += sizes[index]
    return [
        replace(plan, items=list({item.index: item for item in plan.items if owner[item.index] == rank}.values()))
        for rank, plan in enumerate(plans)
    ]


def merged_metadata(plans: Sequence[SavePlan]) -> Metadata:
    """The metadata of the checkpoint that these plans write."""
    entries = merged_entries([(item.index.fqn, item.tensor_data) for item in plan.items] for plan in plans)
    paths = Paths()  # a subclass that adds other planner data must merge them itself
    for plan in plans:
        if isinstance(plan.planner_data, dict):
            paths |= plan.planner_data
    paths.forms = merged_forms(forms_of(plan.planner_data) for plan in plans)
    return Metadata(entries, planner_data=paths if paths or paths.forms else None)


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
