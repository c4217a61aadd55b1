"""How a checkpoint sees a distributed tensor.

Anything with a method `__create_chunk_list__` is one: a list of this rank's chunks of the global tensor.  Its data
is `to_local()` when there is one chunk, and `__get_tensor_shard__(index)` when there are more.  If it also has
`device_mesh` and `placements` (or `holders`, the global ranks themselves), they tell which other ranks hold the same
chunk, so that one of them can write it without asking; if not, ranks compare notes (`ownership`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.checkpoint import interop
from terrazzo.checkpoint.metadata import MetadataIndex
from terrazzo.errors import UnsupportedValueError
from terrazzo.layout.box import Box


@dataclass(frozen=True, slots=True)
class ShardView:
    """A rank's part of a distributed tensor.

    `holders` are the global ranks, in order, that hold exactly the same chunks; None if the tensor does not say.
    """

    size: torch.Size
    dtype: torch.dtype
    chunks: tuple[tuple[Box, torch.Tensor], ...]
    holders: tuple[int, ...] | None


def is_sharded(value: Any) -> bool:
    """Whether `value` is a distributed tensor, of whatever library."""
    return hasattr(type(value), "__create_chunk_list__") or interop.is_sharded_tensor(value)


class Viewer:
    """Makes views, and remembers what is the same for all tensors of one mesh and placements.

    A mesh tells who holds a chunk among its own ranks only.  Where `ranks`, those that save together, are more, others may
    hold the same chunks on meshes of their own (FSDP along one dim of a larger mesh, say), so holders are unknown.
    """

    def __init__(self, ranks: Collection[int] = ()) -> None:
        self._ranks = frozenset(ranks)
        self._holders: dict[tuple[int, tuple[Any, ...]], tuple[int, ...] | None] = {}
        self._boxes: dict[tuple[Any, ...], Box] = {}

    def view(self, name: str, value: Any) -> ShardView:
        """This rank's part of the distributed tensor `value`."""
        if interop.is_sharded_tensor(value):
            return self._view_shards(name, value, interop.local_shards(value), interop.own_rank())
        mesh = getattr(value, "device_mesh", None)
        if mesh is None:
            holders, key = getattr(value, "holders", None), None
        else:
            placements = tuple(value.placements)
            holders = self._holders_of(name, mesh, placements)
            # Mesh, placements and shape say where the chunk is, so it is asked for once for all tensors that share them.
            key = (type(value), id(mesh), placements, value.size())
            box = self._boxes.get(key)
            if box is not None:
                with torch.no_grad():
                    return self._view_shards(name, value, [(box, value.to_local())], holders)
        chunks = [] if holders == () else value.__create_chunk_list__()
        with torch.no_grad():
            if len(chunks) == 1:
                box = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
                if key is not None:
                    self._boxes[key] = box
                shards = [(box, value.to_local())]
            else:
                shards = [
                    (
                        Box(tuple(c.offsets), tuple(c.sizes)),
                        value.__get_tensor_shard__(MetadataIndex(name, c.offsets, i)),
                    )
                    for i, c in enumerate(chunks)
                ]
            return self._view_shards(name, value, shards, holders)

    def _view_shards(
        self, name: str, value: Any, shards: list[tuple[Box, Any]], holders: tuple[int, ...] | None
    ) -> ShardView:
        chunks: list[tuple[Box, torch.Tensor]] = []
        for box, local in shards:
            if is_sharded(
                local
            ):  # a sharded tensor of sharded tensors: FSDP over tensor parallelism, as PyTorch 1 nests it
                inner = self.view(name, local)
                holders = inner.holders if holders is not None else None
                chunks += [(part.shifted(box.offsets), tensor) for part, tensor in inner.chunks]
            elif not box.is_empty:
                if local.shape != box.lengths:
                    raise UnsupportedValueError(
                        f"{name!r}: the chunk at {box.offsets} should be of shape {box.lengths}, "
                        f"but the local tensor is of shape {tuple(local.shape)}"
                    )
                chunks.append((box, local.detach()))
        return ShardView(value.size(), value.dtype, tuple(chunks), holders)

    def _holders_of(self, name: str, mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...] | None:
        key = (id(mesh), placements)
        if key not in self._holders:
            if any(placement.is_partial() for placement in placements):
                raise UnsupportedValueError(
                    f"{name!r} has placements {placements}: partial values are not the tensor's values; "
                    f"redistribute it to Replicate or Shard before saving"
                )
            coordinate = mesh.get_coordinate()
            holders: tuple[int, ...] | None
            if coordinate is None:
                holders = ()
            elif not self._ranks <= set(mesh.mesh.reshape(-1).tolist()):
                holders = None
            else:
                index = tuple(
                    slice(None) if placement.is_replicate() else position
                    for placement, position in zip(placements, coordinate, strict=True)
                )
                holders = tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))
            self._holders[key] = holders
        return self._holders[key]


def local_chunks(name: str, value: Any, view: Callable[[str, Any], ShardView]) -> ShardView:
    """The view of any tensor: a plain one is a single chunk that every rank may hold."""
    if is_sharded(value):
        return view(name, value)
    return ShardView(value.shape, value.dtype, ((Box.whole(value.shape), value.detach()),), None)


def flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state dict.

    PyTorch's planners rewrite sharded tensors of sharded tensors at this point; a `Viewer` sees through them
    instead, and the function remains for planners that call it.
    """
    return dict(state_dict)
