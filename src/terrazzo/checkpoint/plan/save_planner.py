"""The default save planner: what of a state dict this rank holds, and which of it this rank writes.

`create_local_plan` lists everything that the rank holds.  Which part of it the rank writes is decided in one of
two ways:
- by `share_plan`, on each rank by itself after one small message (`ownership`): the usual way;
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

from terrazzo.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.memory import same_memory
from terrazzo.checkpoint.native.objects import ObjectBytes, encode
from terrazzo.checkpoint.plan.digest import digest_of_tensor
from terrazzo.checkpoint.plan.flatten import flatten_state_dict, paths_to_store
from terrazzo.checkpoint.plan.global_plan import GlobalPlanCache, deduplicated, merged_metadata
from terrazzo.checkpoint.plan.ownership import Claim, Negotiation, assign
from terrazzo.checkpoint.plan.per_rank import PerRank, matches_any, name_on_rank
from terrazzo.checkpoint.plan.sharded import OWN_MEMORY, Holders, Viewer, check_storable, is_sharded, local_chunks
from terrazzo.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_span

# Replicated tensors from this size on are written in parts by all their holders.
SPLIT_FROM: Final = 16 << 20
# Ranks see different data, so their running statistics differ; PyTorch's DDP keeps those of rank 0.
_STATISTICS: Final = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_SCALARS: Final = frozenset({bool, int, float, complex, str})


class _Holding(msgspec.Struct, frozen=True, eq=False):
    """What this rank holds behind one item: the data, and which ranks of the group hold the same (None: unknown)."""

    value: Any
    holders: tuple[int, ...] | None


class DefaultSavePlanner(SavePlanner):
    """Plans the saving of nested state dicts of tensors, distributed tensors and other values.

    Replicated values are written once; large replicated tensors are split among the ranks that hold them, so
    that bytes balance.  `dedup_save_to_lowest_rank` gives each to its lowest rank instead.
    `enable_plan_caching` spares the ranks sending their plans again, and the coordinator making the global one,
    when nothing changed since the last save with this planner object (only where a global plan is made at all).
    `flatten_sharded_tensors` and `dedup_replicated_tensors` are accepted for compatibility: sharded tensors of
    sharded tensors are always seen through, replicated tensors are never written twice.

    `per_rank` names (shell-style patterns) values that each rank has its own of;  `lowest_rank_wins` names
    replicated values that may differ, of which the lowest rank's is kept.  That is also done, with one
    `DivergentValueWarning`, for the running statistics of batch norm and for plain scalars (`loss.item()`), which
    commonly differ; values of all other names must be equal on all ranks that hold them, or `DivergentValueError` is
    raised.  `allow_pickle` stores values that have no typed form as pickles.
    """

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
        self.plan_cache = GlobalPlanCache() if enable_plan_caching else None
        self.rank = 0
        self.ranks: tuple[int, ...] = (0,)
        self._per_rank = tuple(per_rank)
        self.lowest_rank_wins = tuple(lowest_rank_wins)
        self._split_from = split_from
        self._holdings: dict[MetadataIndex, _Holding] = {}
        # Of the parts of split tensors: the index of the whole, and the dim, start and length of the part.
        self._parts: dict[MetadataIndex, tuple[MetadataIndex, int, int, int]] = {}
        self._translated: dict[int, tuple[int, ...] | None] = {}
        # By address, the first chunk that is there; and of chunks that are the same memory as an earlier one, that one.
        self._at: dict[int, tuple[MetadataIndex, TensorWriteData, torch.Tensor]] = {}
        self._ties: dict[MetadataIndex, MetadataIndex] = {}
        # What items say of their chunks is the same for all tensors of one shape, dtype and place.
        self._described: dict[tuple[Any, ...], TensorWriteData] = {}

    @property
    def plans_alone(self) -> bool:
        """Whether `share_plan` does all there is to do: false when a subclass has its own global step."""
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
        self.mappings: dict[str, tuple[Any, ...]] = {}
        if self.flatten_state_dict:
            nested = state_dict
            state_dict, paths = flatten_state_dict(nested)
            self.mappings = paths_to_store(nested, paths)
        self.state_dict = state_dict
        self.storage_meta = storage_meta
        self.is_coordinator = is_coordinator

    @torch.no_grad()
    def create_local_plan(self) -> SavePlan:
        self._holdings, self._parts, self._at, self._ties = {}, {}, {}, {}
        viewer = Viewer()
        self._translated, self._described = {}, {}
        items: list[WriteItem] = []
        mappings = {}
        unsupported: list[str] = []
        for name, value in self.state_dict.items():
            own = isinstance(value, PerRank) or (bool(self._per_rank) and matches_any(name, self._per_rank))
            stored = name_on_rank(name, self.rank) if own else name
            if isinstance(value, PerRank):
                value = value.value
            path = self.mappings.get(name)
            if path is not None and len(path) > 1:
                mappings[stored] = (*path[:-1], name_on_rank(path[-1], self.rank)) if own else path
            try:
                if isinstance(value, torch.Tensor) or is_sharded(value):
                    items += self._tensor_items(stored, value, viewer, own)
                else:
                    items.append(self._object_item(stored, value, own))
            except UnsupportedValueError as error:
                unsupported.append(f"{name}: {error}")
        if unsupported:
            raise UnsupportedValueError("the state dict holds what cannot be stored:\n  " + "\n  ".join(unsupported))
        return SavePlan(items, planner_data=mappings or None)

    def _tensor_items(self, name: str, value: Any, viewer: Viewer, own: bool) -> list[WriteItem]:
        check_storable(value)
        view = local_chunks(name, value, viewer.view)
        holders = (self.rank,) if own else self._in_group(view.holders)
        chunks = view.chunks
        if 0 in view.size:  # no rank has a chunk of it, but its name and shape are to be kept
            chunks = ((Box.whole(view.size), torch.empty(view.size, dtype=view.dtype)),)
            holders = holders if own else None
        sharded = len(chunks) != 1 or chunks[0][0].lengths != view.size
        kind = WriteItemType.SHARD if sharded else WriteItemType.TENSOR
        items = []
        for box, data in chunks:
            described = self._describe(view.size, data, box)
            item = WriteItem(MetadataIndex(name, described.chunk.offsets), kind, described)
            items.append(item)
            self._holdings[item.index] = _Holding(data, holders)
            if type(data) in OWN_MEMORY and data.data_ptr():
                first = self._at.setdefault(data.data_ptr(), (item.index, described, data))
                if first[0] is not item.index and first[1] == described and same_memory(first[2], data):
                    self._ties[item.index] = first[0]
        return items

    def _describe(self, size: torch.Size, data: torch.Tensor, box: Box) -> TensorWriteData:
        key = (size, data.dtype, data.requires_grad, box)
        found = self._described.get(key)
        if found is None:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
            properties = TensorProperties(data.dtype, requires_grad=data.requires_grad)
            found = self._described[key] = TensorWriteData(chunk, properties, size)
        return found

    def _in_group(self, holders: Holders | None) -> tuple[int, ...] | None:
        """The holders as ranks of the group; None if some rank of the group may hold the same and is not among them."""
        if holders is None:
            return None
        if id(holders) not in self._translated:
            known = holders.among.issuperset(self.ranks)
            group_ranks = tuple(position for position, rank in enumerate(self.ranks) if rank in holders.ranks)
            self._translated[id(holders)] = group_ranks if known else None
        return self._translated[id(holders)]

    def _object_item(self, name: str, value: Any, own: bool) -> WriteItem:
        index = MetadataIndex(name)
        encoded = ObjectBytes(value, encode(value, allow_pickle=self.allow_pickle))
        self._holdings[index] = _Holding(encoded, (self.rank,) if own else None)
        return WriteItem(index, WriteItemType.BYTE_IO)

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
        kind = type(self)
        return (
            kind.resolve_data is DefaultSavePlanner.resolve_data
            and kind.lookup_object is DefaultSavePlanner.lookup_object
            and kind.transform_object is DefaultSavePlanner.transform_object
        )

    def save_side(self) -> DefaultSavePlanner:
        """How a save uses this planner: see `run.planner_sides`."""
        return self

    def negotiate(self, plan: SavePlan) -> Negotiation:
        """This rank's side of the agreement on who writes what, before anything has been sent."""
        sizes: dict[int, int] = {}  # by description, of which many items share one
        claims: list[Claim] = []
        for item in plan.items:
            nbytes = sizes.get(id(item.tensor_data))
            if nbytes is None:
                nbytes = sizes[id(item.tensor_data)] = item.tensor_storage_size() or 0
            claims.append(self._claim(item, nbytes))
        if self._ties and self._hands_out_memory:
            identities = {item.index: claim.identity for item, claim in zip(plan.items, claims, strict=True)}
            for place, item in enumerate(plan.items):
                first = identities.get(self._ties.get(item.index, item.index), 0)
                if item.index in self._ties and first:
                    claims[place] = msgspec.structs.replace(claims[place], tied=first)
        return Negotiation(claims, self.rank, len(self.ranks))

    def _claim(self, item: WriteItem, nbytes: int) -> Claim:
        holding = self._holdings.get(item.index)
        name = item.index.fqn
        alone = (self.rank,)
        if holding is not None and holding.holders == alone:  # no other rank has to recognise it
            return Claim(name, 0, nbytes, alone)
        data = item.tensor_data
        if data is None:
            identity = checksum(f"{name}\0object".encode())
        else:
            chunk = data.chunk
            described = f"{name}\0{data.properties.dtype}{tuple(data.size)}{tuple(chunk.offsets)}{tuple(chunk.sizes)}"
            identity = checksum(described.encode())
        if holding is None:  # an item that a subclass has made
            return Claim(name, identity, nbytes, None)
        lowest = bool(self.lowest_rank_wins) and matches_any(name, self.lowest_rank_wins)
        content, lenient = None, False
        if holding.holders is None and not lowest and len(self.ranks) > 1:
            content = _digest_of(holding.value)
            lenient = _is_lenient(name, holding.value)
        return Claim(name, identity, nbytes, holding.holders, content, lowest, lenient)

    def share_plan(self, plan: SavePlan, negotiation: Negotiation, holders: Sequence[tuple[int, ...]]) -> SavePlan:
        """This rank's part of the global plan, worked out here from who holds what."""
        shares = assign(
            negotiation.claims,
            holders,
            self.rank,
            split_from=self._split_from,
            lowest_rank=self.dedup_save_to_lowest_rank,
            ties=negotiation.ties(),
        )
        items = []
        for share in shares:
            item = plan.items[share.claim]
            if share.parts > 1:
                items += self._part_of(item, share.index, share.parts)
            else:
                items.append(item)
        return replace(plan, items=items)

    def _part_of(self, item: WriteItem, index: int, parts: int) -> list[WriteItem]:
        """The item for one of `parts` about equal parts of an item's chunk; none if there are not so many."""
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn!r}: only tensors can be split among ranks")
        box = data.chunk.box
        # The first dim that is long enough: the earlier it is, the larger the runs of the part in memory.
        dim = next((d for d, length in enumerate(box.lengths) if length >= parts), None)
        if dim is None:
            dim = max(range(box.ndim), key=lambda d: box.lengths[d])
        start, length = chunk_span(box.lengths[dim], parts, index)
        if length == 0:
            return []
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += start
        lengths[dim] = length
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        part = replace(
            item,
            index=MetadataIndex(item.index.fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=replace(data, chunk=chunk),
        )
        # The first part has the index of the whole, which stays known by it too.
        self._parts[part.index] = (item.index, dim, start, length)
        return [part]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = deduplicated(all_plans, lowest_rank=self.dedup_save_to_lowest_rank)
        return plans, merged_metadata(plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def forget(self) -> None:
        """Let go of the state, which a planner that is kept would keep alive."""
        self.state_dict = {}
        self._holdings, self._parts, self._translated, self._described = {}, {}, {}, {}
        self._at, self._ties = {}, {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What this rank holds under an index of its plan: the chunk's data, or the value that is not a tensor."""
        if self._parts and index in self._parts:
            whole, dim, start, length = self._parts[index]
            return self._holdings[whole].value.narrow(dim, start, length)
        try:
            value = self._holdings[index].value
        except KeyError:
            raise CheckpointError(f"this rank holds nothing under {index}") from None
        return value.value if isinstance(value, ObjectBytes) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written for `object`: a tensor as it is, another value as a `BytesIO`."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        holding = self._holdings.get(write_item.index)
        if holding is not None and isinstance(holding.value, ObjectBytes) and holding.value.value is object:
            return holding.value
        return ObjectBytes(object, encode(object, allow_pickle=self.allow_pickle))


def _is_lenient(name: str, value: Any) -> bool:
    """Whether a value is of a kind that commonly differs between ranks without harm: one of them will do."""
    if isinstance(value, ObjectBytes):
        return value.value is None or type(value.value) in _SCALARS or isinstance(value.value, np.generic)
    return name.rpartition(".")[2] in _STATISTICS


def _digest_of(value: Any) -> int:
    if isinstance(value, ObjectBytes):
        return checksum(value.encoded())
    return digest_of_tensor(value)
