"""The default save planner: what of a state dict this rank holds, and which of it this rank writes.

`create_local_plan` lists everything that the rank holds. Which part of it the rank writes is decided in one of
two ways:
- by each rank itself, after one small message (`ownership`): the usual way;
- by `create_global_plan`, on the coordinator, with the plans of all ranks: when a subclass overrides it, or when the
  storage wants to see all plans.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from terrazzo.checkpoint.native.containers import Paths
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.names import for_torch
from terrazzo.checkpoint.native.objects import ObjectBytes, encode
from terrazzo.checkpoint.native.root import TENSOR, TYPED
from terrazzo.checkpoint.native.rows import NO_FORM, Form, Row, form_of, object_row
from terrazzo.checkpoint.native.tensors import OWN_MEMORY, dtype_name, same_memory
from terrazzo.checkpoint.plan.flatten import (
    PerRank,
    check_names,
    flatten_state_dict,
    matches_any,
    name_on_rank,
    paths_to_store,
)
from terrazzo.checkpoint.plan.ownership import Agreement, Claim, digests_of_tensors
from terrazzo.checkpoint.plan.sharded import Holders, ShardViews, check_storable, is_sharded, plain_view
from terrazzo.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from terrazzo.checkpoint.torch_api.items import deduplicated, is_unchanged, item_of, merged_metadata, rows_of
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box

# Replicated tensors from this size on are written in parts by all their holders.
SPLIT_FROM: Final = 16 << 20
# Ranks see different data, so their running statistics differ; PyTorch's DDP keeps those of rank 0.
_STATISTICS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_IN_VALUE: Final = (
    "a PerRank in a list or tuple that is stored as one value; a PerRank must be a value of a dict: wrap the whole "
    "list (PerRank([...])), or make it a dict"
)
_SCALARS: Final = frozenset({bool, int, float, complex, str})


# A subclass that changes one of these sees items, or makes other ones.
_SEES_ITEMS: Final = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "lookup_object",
    "transform_object",
    "hold_items",
    "items_of",
    "tied_to",
)


class DefaultSavePlanner(SavePlanner):
    """Plans the saving of nested state dicts of tensors, distributed tensors and other values.

    Replicated values are written once; large replicated tensors are split among the ranks that hold them, so
    that bytes balance. `dedup_save_to_lowest_rank` gives each to its lowest rank instead.
    `flatten_sharded_tensors`, `dedup_replicated_tensors` and `enable_plan_caching` are accepted for compatibility:
    sharded tensors of sharded tensors are always seen through, replicated tensors are never written twice, and ranks
    send no plans unless a planner or a storage of your own asks for them.

    `per_rank` names (shell-style patterns) values that each rank has its own of;  `lowest_rank_wins` names
    replicated values that may differ, of which the lowest rank's is kept. That is also done, with one
    `DivergentValueWarning`, for the running statistics of batch norm and for plain scalars (`loss.item()`), which
    commonly differ; values of all other names must be equal on all ranks that hold them, or `DivergentValueError` is
    raised; under `terrazzo.install()` it is the lowest rank's, with the warning, for all names, because PyTorch takes
    the value of any rank. `allow_pickle` stores values that have no typed form as pickles.
    """

    mappings: Paths

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        per_rank: Iterable[str] = (),
        lowest_rank_wins: Iterable[str] = (),
        allow_pickle: bool = False,
        split_from: int = SPLIT_FROM,
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.allow_pickle = allow_pickle
        self.rank = 0
        self.ranks: tuple[int, ...] = (0,)
        self.mappings = Paths()
        self._per_rank = tuple(per_rank)
        self.lowest_rank_wins = tuple(lowest_rank_wins)
        self._split_from = split_from
        # Only if items are wanted: what is behind each.
        self._held: dict[MetadataIndex, Row] = {}
        # Of the parts of split tensors: the index of the whole, and the box of the part in it.
        self._parts: dict[MetadataIndex, tuple[MetadataIndex, Box]] = {}
        self._translated: dict[int, tuple[int, ...] | None] = {}
        # Of items that are the same memory as an earlier one, that one.
        self._ties: dict[MetadataIndex, MetadataIndex] = {}

    @property
    def plans_alone(self) -> bool:
        """Whether each rank can work out its own part: false when a subclass has its own global step."""
        return type(self).create_global_plan is DefaultSavePlanner.create_global_plan

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Learn this rank's place in the group, and the global ranks that make up the group."""
        self.rank = rank
        self.ranks = ranks

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | bool | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if isinstance(storage_meta, bool):  # planners for PyTorch before 2.3 pass is_coordinator here
            is_coordinator = storage_meta
            storage_meta = None
        self.mappings = Paths()
        if self.flatten_state_dict:
            nested = state_dict
            state_dict, paths = flatten_state_dict(nested)
            self.mappings = paths_to_store(nested, paths)
        else:
            check_names(state_dict)
        self.state_dict = state_dict
        self.storage_meta = storage_meta
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        rows, paths = self._all_held()
        described: dict[int, TensorWriteData] = {}  # by form, which many share
        items = [item_of(row, described) for row in rows]
        self._held = {item.index: row for row, item in zip(rows, items, strict=True)}
        self._parts = {}
        by_key = {row.key: item.index for row, item in zip(rows, items, strict=True)}
        self._ties = {
            item.index: by_key[row.tied] for row, item in zip(rows, items, strict=True) if row.tied is not None
        }
        return SavePlan(items, planner_data=paths)

    def hold(self) -> Agreement | None:
        """What this rank could write as rows; None if a subclass makes, sees or changes items."""
        return self._agreeing(*self._all_held()) if is_unchanged(self, DefaultSavePlanner, _SEES_ITEMS) else None

    def hold_items(self, plan: SavePlan) -> Agreement:
        """The same of a plan's items, which a subclass may have made or changed; `items_of` is the way back."""
        rows: list[Row] = []
        places = {item.index: number for number, item in enumerate(plan.items)}
        for number, (item, row) in enumerate(zip(plan.items, rows_of(plan.items), strict=True)):
            known = self._held.get(item.index)
            first = self._ties.get(item.index) if self._hands_out_memory else None
            changes: dict[str, Any] = {} if known is None else {"value": known.value, "holders": known.holders}
            if known is not None and known.kind != TENSOR:
                changes |= {"form": NO_FORM, "kind": TYPED}
            tied = None if first is None else places.get(first)
            rows.append(msgspec.structs.replace(row, key=number, tied=tied, **changes))
        return self._agreeing(rows, None)

    def _agreeing(self, rows: list[Row], paths: dict[str, tuple[Any, ...]] | None) -> Agreement:
        """Rows whose keys are their numbers, and this rank's side of the agreement on who writes them."""
        claimed = [number for number, row in enumerate(rows) if row.holders != (self.rank,)]
        places = {number: place for place, number in enumerate(claimed)}
        claims = [self._claim(rows[number]) for number in claimed]
        self._add_contents(claims, [rows[number] for number in claimed])
        for place, number in enumerate(claimed):
            first: Any = rows[number].tied
            if first in places:
                claims[place] = msgspec.structs.replace(claims[place], tied=claims[places[first]].identity)
        return Agreement(
            claims,
            self.rank,
            len(self.ranks),
            rows,
            claimed,
            paths,
            split_from=self._split_from,
            lowest_rank=self.dedup_save_to_lowest_rank,
        )

    @torch.no_grad()
    def _all_held(self) -> tuple[list[Row], dict[str, tuple[Any, ...]] | None]:
        """Everything that this rank could write, each with its number as its key; and the paths of all names."""
        self._translated = {}
        viewer = ShardViews()
        forms: dict[tuple[int, torch.dtype, bool], Form] = {}  # one for all chunks that have the same
        at: dict[int, int] = {}  # by address: the first chunk that is there
        rows: list[Row] = []
        paths = Paths(forms=self.mappings.forms)
        unsupported: list[str] = []
        mappings, per_rank = self.mappings, self._per_rank
        for name, value in self.state_dict.items():
            own = False
            if type(value) is PerRank:
                own, value = True, value.value
            elif per_rank:
                own = matches_any(name, per_rank)
            stored = name_on_rank(name, self.rank) if own else name
            path = mappings.get(name)
            if path is not None and len(path) > 1:
                paths[stored] = (*path[:-1], name_on_rank(path[-1], self.rank)) if own else path
            try:
                sharded = is_sharded(value)
                if not (sharded or isinstance(value, torch.Tensor)):
                    encoded = ObjectBytes(value, encode(value, allow_pickle=self.allow_pickle))
                    holders = (self.rank,) if own else self._in_group(None)
                    rows.append(object_row(stored, TYPED, encoded, holders, len(rows)))
                    continue
                if not sharded:
                    check_storable(value)
                seen = viewer.view(stored, value) if sharded else plain_view(stored, value)
                if not seen.chunks:  # the ranks that have chunks raise for the dtype, and so does this one
                    dtype_name(seen.dtype)
                chunks, holders = seen.chunks, (self.rank,) if own else self._in_group(seen.holders)
                if 0 in seen.size:  # no rank has a chunk of it, but its name and shape are to be kept
                    chunks = ((Box.whole(seen.size), torch.empty(seen.size, dtype=seen.dtype, device="cpu")),)
                    holders = holders if own else self._in_group(None)
                for box, data in chunks:
                    key = (id(box), data.dtype, data.requires_grad)
                    form = forms.get(key)
                    if form is None or form.shape != seen.size:
                        form = forms[key] = form_of(data.dtype, tuple(seen.size), box, data.requires_grad)
                    tied = None
                    if type(data) in OWN_MEMORY and (address := data.data_ptr()):
                        first = at.setdefault(address, len(rows))
                        if first != len(rows) and rows[first].form == form and same_memory(rows[first].value, data):
                            tied = first
                    rows.append(Row(stored, form, data, TENSOR, holders, len(rows), tied))
            except UnsupportedValueError as error:
                text = _IN_VALUE if _has_per_rank(value, set()) else str(error)
                unsupported.append(text if text.startswith(f"{stored!r}: ") else f"{name}: {text}")
        if unsupported:
            raise UnsupportedValueError("the state dict holds what cannot be stored:\n  " + "\n  ".join(unsupported))
        return rows, paths if paths or paths.forms else None

    def _in_group(self, holders: Holders | None) -> tuple[int, ...] | None:
        """The holders as ranks of the group; None if some rank of the group may hold the same and is not among them."""
        if len(self.ranks) == 1:
            return (self.rank,)
        if holders is None:
            return None
        if id(holders) not in self._translated:
            known = holders.among.issuperset(self.ranks)
            group_ranks = tuple(position for position, rank in enumerate(self.ranks) if rank in holders.ranks)
            self._translated[id(holders)] = group_ranks if known else None
        return self._translated[id(holders)]

    def tied_to(self, index: MetadataIndex) -> MetadataIndex | None:
        """An item whose data is the same memory, and so need not be written twice; None if there is none before it."""
        if not self._ties or not self._hands_out_memory:
            return None
        whole = self._parts[index][0] if index in self._parts else index
        first = self._ties.get(whole)
        return None if first is None else MetadataIndex(first.fqn, index.offset)

    @property
    def _hands_out_memory(self) -> bool:
        """Whether what is written is the state dict's own memory: false when a subclass converts it."""
        return is_unchanged(self, DefaultSavePlanner, ("resolve_data", "lookup_object", "transform_object"))

    def _claim(self, row: Row) -> Claim:
        name, form = row.name, row.form
        if row.kind == TENSOR:
            nbytes, described = form.nbytes, f"{name}\0{form.dtype}{form.shape}{form.box.offsets}{form.box.lengths}"
        else:
            nbytes, described = 0, f"{name}\0object"
        identity = checksum(described.encode())
        if row.value is None:  # of an item that a subclass has made
            return Claim(name, identity, nbytes, None)
        lowest = bool(self.lowest_rank_wins) and matches_any(name, self.lowest_rank_wins)
        return Claim(name, identity, nbytes, row.holders, lowest=lowest)

    def _add_contents(self, claims: list[Claim], rows: Sequence[Row]) -> None:
        """Complete the claims of values that other ranks may hold, too, with digests of the values."""
        compared = [
            place
            for place, (claim, row) in enumerate(zip(claims, rows, strict=True))
            if claim.holders is None and row.value is not None and not claim.lowest and len(self.ranks) > 1
        ]
        values = [rows[place].value for place in compared]
        of_tensors = iter(digests_of_tensors([value for value in values if not isinstance(value, ObjectBytes)]))
        programs_of_torch = for_torch()  # PyTorch writes any rank's value, and says nothing
        for place, value in zip(compared, values, strict=True):
            content = checksum(value.encoded()) if isinstance(value, ObjectBytes) else next(of_tensors)
            lenient = programs_of_torch or _is_lenient(claims[place].name, value)
            claims[place] = msgspec.structs.replace(claims[place], content=content, lenient=lenient)

    def items_of(self, plan: SavePlan, rows: Sequence[Row]) -> list[WriteItem]:
        """The items of a plan, or parts of them, of which these rows have been made and kept."""
        items = []
        for row in rows:
            number: Any = row.key
            items.append(
                plan.items[number] if type(number) is int else self._part_of(plan.items[number[0]], row.form.box)
            )
        return items

    def _part_of(self, item: WriteItem, box: Box) -> WriteItem:
        """The item for a part of an item's chunk."""
        assert item.tensor_data is not None
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        part = replace(
            item,
            index=MetadataIndex(item.index.fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=replace(item.tensor_data, chunk=chunk),
        )
        # The first part has the index of the whole, which stays known by it too.
        self._parts[part.index] = item.index, box.relative_to(item.tensor_data.chunk.box)
        return part

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = deduplicated(all_plans, lowest_rank=self.dedup_save_to_lowest_rank)
        return plans, merged_metadata(plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def forget(self) -> None:
        """Let go of the state, which a planner that is kept would keep alive."""
        self.state_dict = {}
        self._held, self._parts, self._translated, self._ties = {}, {}, {}, {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What this rank holds under an index of its plan: the chunk's data, or the value that is not a tensor."""
        if self._parts and index in self._parts:
            whole, box = self._parts[index]
            return self._held[whole].value[box.slices()]
        try:
            value = self._held[index].value
        except KeyError:
            raise CheckpointError(f"this rank holds nothing under {index}") from None
        return value.value if isinstance(value, ObjectBytes) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written for `object`: a tensor as it is, another value as a `BytesIO`."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        row = self._held.get(write_item.index)
        if row is not None and isinstance(row.value, ObjectBytes) and row.value.value is object:
            return row.value
        return ObjectBytes(object, encode(object, allow_pickle=self.allow_pickle))


def _has_per_rank(value: Any, seen: set[int]) -> bool:
    """Whether a value that is stored as a whole has a `PerRank` in it, apart from the containers that are in `seen`."""
    if not isinstance(value, dict | list | tuple | set) or id(value) in seen:
        return isinstance(value, PerRank)
    seen.add(id(value))
    return any(_has_per_rank(each, seen) for each in (value.values() if isinstance(value, dict) else value))


def _is_lenient(name: str, value: Any) -> bool:
    """Whether a value is of a kind that commonly differs between ranks without harm: one of them will do."""
    if isinstance(value, ObjectBytes):
        return value.value is None or type(value.value) in _SCALARS or isinstance(value.value, np.generic)
    return name.rpartition(".")[2] in _STATISTICS
