"""How a checkpoint sees a distributed tensor.

Anything with a method `__create_chunk_list__` is one: a list of this rank's chunks of the global tensor. Its data
is `to_local()` if there is one chunk, and `__get_tensor_shard__(index)` if there are more. If it also has
`device_mesh` and `placements`, these say which other ranks hold the same chunk, so that one of them can write it
without communication; if not, the ranks exchange what they hold (`ownership`).

The library's own classes that consist of chunks (`ChunkedTensor`) have a method `own_chunks`, which returns boxes and
elements together. PyTorch's `ShardedTensor` has no `__create_chunk_list__`; its shards are looked at. A plain tensor
with the attributes of `CheckpointableTensor` is one, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from terrazzo.checkpoint.native.tensors import OWN_MEMORY, dtype_name, fault_of, in_memory
from terrazzo.errors import UnsupportedValueError
from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class Holders:
    """The global ranks, in order, that hold exactly the same chunks, among the ranks of a mesh.

    Ranks outside the mesh may hold the same chunks on meshes of their own (FSDP along one dim of a larger mesh, say).
    """

    ranks: tuple[int, ...]
    among: frozenset[int]


class ShardView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A rank's part of a distributed tensor. `holders` is None if the tensor does not say who holds the same."""

    size: torch.Size
    dtype: torch.dtype
    chunks: tuple[tuple[Box, torch.Tensor], ...]
    holders: Holders | None


def is_sharded(value: Any) -> bool:
    """Whether `value` is a distributed tensor, of whatever library."""
    kind: Any = type(value)
    return _is_sharded_type(kind) or (hasattr(value, "global_offsets") and isinstance(value, torch.Tensor))


def global_size(value: Any) -> torch.Size:
    """The shape of a distributed tensor, of all ranks' parts together."""
    kind: Any = type(value)
    return value.size() if _is_sharded_type(kind) else torch.Size(value.global_shape)


@functools.lru_cache(maxsize=1024)
def _is_sharded_type(kind: type[Any]) -> bool:
    return hasattr(kind, "__create_chunk_list__") or _is_sharded_tensor(kind)


class ShardViews:
    """Makes views, and caches what all tensors of one mesh, placements and shape share."""

    def __init__(self) -> None:
        # By kind, mesh and placements: who holds the same, and this rank's box of tensors of each shape.
        self._groups: dict[tuple[type[Any], int, tuple[Any, ...]], tuple[Holders, dict[torch.Size, Box]]] = {}
        self._last: tuple[type[Any], Any, Any, tuple[Holders, dict[torch.Size, Box]]] | None = None

    def view(self, name: str, value: Any) -> ShardView:
        """This rank's part of the distributed tensor `value`. For use under `torch.no_grad`."""
        mesh = getattr(value, "device_mesh", None)
        if mesh is None:
            return self._view_without_mesh(name, value)
        kind, placements, size = type(value), value.placements, value.size()
        last = self._last
        if last is not None and last[0] is kind and last[1] is mesh and last[2] is placements:
            holders, boxes = last[3]
        else:
            key = (kind, id(mesh), tuple(placements))
            if key not in self._groups:
                self._groups[key] = _holders_of(name, mesh, key[2]), {}
            holders, boxes = self._groups[key]
            if type(placements) is tuple:  # immutable
                self._last = kind, mesh, placements, (holders, boxes)
        if not holders.ranks:  # this rank is not in the mesh
            return ShardView(size, value.dtype, (), holders)
        # Mesh, placements and shape determine the chunk, so it is computed once for all tensors that share them.
        box = boxes.get(size)
        if box is None:
            chunks = value.__create_chunk_list__()
            if len(chunks) == 1 and 0 not in chunks[0].sizes:
                box = boxes[size] = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
        if box is not None:
            local = value.to_local()
            if local.shape == box.lengths and type(local) in OWN_MEMORY and in_memory(local):
                return ShardView(size, value.dtype, ((box, local.detach() if local.requires_grad else local),), holders)
        return self._view_shards(name, value, _shards(name, value), holders)

    def _view_without_mesh(self, name: str, value: Any) -> ShardView:
        kind = type(value)
        if _is_sharded_tensor(kind):
            theirs = [(each.metadata, each.tensor) for each in value.local_shards()]
            boxes = [(Box(tuple(at.shard_offsets), tuple(at.shard_sizes)), tensor) for at, tensor in theirs]
            return self._view_shards(name, value, boxes, None)
        if not hasattr(kind, "__create_chunk_list__"):
            return _of_local_parts(name, value)
        own = getattr(value, "own_chunks", None)
        shards = _shards(name, value) if own is None else own()
        return self._view_shards(name, value, shards, getattr(value, "holders", None))

    def _view_shards(self, name: str, value: Any, shards: list[tuple[Box, Any]], holders: Holders | None) -> ShardView:
        chunks: list[tuple[Box, torch.Tensor]] = []
        for box, local in shards:
            if is_sharded(local):  # FSDP over tensor parallelism, as PyTorch 1 nests it
                inner = self.view(name, local)
                holders = None
                chunks += [(part.shifted(box.offsets), tensor) for part, tensor in inner.chunks]
            elif not box.is_empty:
                if hasattr(local, "trigger_wait"):  # the result of a collective that may still run
                    local = local.wait()
                fault = fault_of(local)
                if fault:
                    raise UnsupportedValueError(f"{name!r}: its local tensor on this rank: {fault}")
                if local.shape != box.lengths:
                    raise UnsupportedValueError(
                        f"{name!r}: the chunk at {box.offsets} should be of shape {box.lengths}, "
                        f"but the local tensor is of shape {tuple(local.shape)}"
                    )
                chunks.append((box, _detached(local)))
        return ShardView(value.size(), value.dtype, tuple(chunks), holders)


def _holders_of(name: str, mesh: Any, placements: tuple[Any, ...]) -> Holders:
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedValueError(
            f"{name!r} has placements {placements}: partial values are not the tensor's values; "
            f"redistribute it to Replicate or Shard before saving"
        )
    ranks: list[int] = []
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        index = tuple(
            slice(None) if placement.is_replicate() else position
            for placement, position in zip(placements, coordinate, strict=True)
        )
        ranks = sorted(mesh.mesh[index].reshape(-1).tolist())
    return Holders(tuple(ranks), frozenset(mesh.mesh.reshape(-1).tolist()))


def _of_local_parts(name: str, value: Any) -> ShardView:
    """The view of a plain tensor whose attributes say of which global tensor it has parts, and where these are in it:
    PyTorch's `CheckpointableTensor`."""
    chunks = []
    places = zip(value.global_offsets, value.local_offsets, value.local_sizes, strict=True)
    for offsets, inside, lengths in places:
        box = Box(tuple(offsets), tuple(lengths))
        own = value[Box(tuple(inside), box.lengths).slices()] if inside else value
        if tuple(own.shape) != box.lengths:
            raise UnsupportedValueError(
                f"{name!r}: the part at {box.offsets} should be of shape {box.lengths}, but the local tensor has only "
                f"{tuple(own.shape)} at {tuple(inside)}; correct its `local_offsets` and `local_sizes`"
            )
        if not box.is_empty:
            chunks.append((box, _detached(own)))
    fault = fault_of(value)
    if fault:
        raise UnsupportedValueError(f"{name!r}: its local tensor on this rank: {fault}")
    return ShardView(torch.Size(value.global_shape), value.dtype, tuple(chunks), None)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _shards(name: str, value: Any) -> list[tuple[Box, Any]]:
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]
    if len(boxes) == 1 and hasattr(value, "to_local"):
        return [(boxes[0], value.to_local())]
    return [
        (box, value.__get_tensor_shard__(MetadataIndex(name, box.offsets, number))) for number, box in enumerate(boxes)
    ]


def local_chunks(name: str, value: Any, view: Callable[[str, Any], ShardView]) -> ShardView:
    """The view of any tensor: a plain one is a single chunk that every rank may hold."""
    return view(name, value) if is_sharded(value) else plain_view(name, value)


def plain_view(name: str, value: torch.Tensor) -> ShardView:
    """The view of a plain tensor."""
    return ShardView(value.shape, value.dtype, (plain_chunk(name, value),), None)


def plain_chunk(name: str, value: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The only chunk of a plain tensor."""
    if type(value) not in OWN_MEMORY or not in_memory(value):
        fault = fault_of(value)
        if fault:
            raise UnsupportedValueError(f"{name!r}: {fault}")
    return _whole(value.shape), _detached(value)


@functools.lru_cache(maxsize=4096)
def _whole(shape: torch.Size) -> Box:
    return Box.whole(shape)


def check_storable(value: Any) -> None:
    """Raise for tensors whose elements are not plain strided memory. A `ShardViews` checks those of sharded tensors."""
    dtype_name(value.dtype)
    if not is_sharded(value):
        fault = fault_of(value)
        if fault:
            raise UnsupportedValueError(fault)


def flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state dict: for planners that call this function of PyTorch's. There is nothing to flatten here."""
    return dict(state_dict)


_MODULE = "torch.distributed._shard.sharded_tensor"


def _is_sharded_tensor(kind: type) -> bool:
    """Whether this is `ShardedTensor`, without importing its module: before an import there are no instances."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.ShardedTensor)


class OfChunks:
    """What other parts see of a class with `own_chunks`: a distributed tensor of a `shape`."""

    __slots__ = ()
    shape: torch.Size

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.shape

    def own_chunks(self) -> Sequence[tuple[Box, torch.Tensor]]:
        """This rank's boxes, and their elements."""
        raise NotImplementedError

    def to_local(self) -> torch.Tensor:
        """The data of the only chunk."""
        ((_, data),) = self.own_chunks()
        return data

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in self.own_chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(data for box, data in self.own_chunks() if box.offsets == tuple(index.offset or ()))


@dataclass(eq=False)
class ChunkedTensor(OfChunks):
    """This rank's boxes of a tensor, and tensors with their elements.

    Other parts of the library save and load boxes of tensors by it.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: Mapping[tuple[int, ...], tuple[Box, torch.Tensor]]
    holders: Holders | None

    def own_chunks(self) -> Sequence[tuple[Box, torch.Tensor]]:
        return list(self.chunks.values())
