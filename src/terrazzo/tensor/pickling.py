"""DTensors in pickles and in `torch.save` files, also those that are loaded with `weights_only=True`.

A pickle holds the local tensor and, as plain data, the number of ranks of the world, the rank that wrote it, the ranks
of the mesh and the placements. Only a rank that holds the same part of the same mesh can load it, in this run or in a
later one of as many ranks; others raise an error, because the part of another rank would be a wrong number. To load
onto others, use `terrazzo.checkpoint`. The mesh is not pickled as an object, because its hash differs between
processes, so the loaded mesh would not equal the live one.

Without a process group a pickle can be inspected: it gives the tensor as its writer had it, with shape, placements and
local tensor, and operations on it work as long as they need no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from terrazzo._torch.tensors import PARAMETER_MARK, mark_as_parameter
from terrazzo.comm.mesh import MeshAsData, mesh_as_data, mesh_from_data
from terrazzo.comm.simulated import real_values
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.placement import _strided_shard
from terrazzo.tensor.dtensor import BRINGS, WRITTEN, DTensor, wrap
from terrazzo.tensor.links import links

# A mark, which is set again, and functions that belong to a model of this process.
_NOT_PICKLED = (PARAMETER_MARK, BRINGS, WRITTEN)


def reduce(tensor: DTensor) -> tuple[Any, ...]:
    """The pickled form of a DTensor."""
    layout = tensor._layout
    state = {k: v for k, v in tensor.__dict__.items() if k not in _NOT_PICKLED}
    is_parameter = bool(tensor.__dict__.get(PARAMETER_MARK))
    where = (mesh_as_data(layout.mesh), tuple(layout.placements), tuple(layout.shape), tuple(layout.order))
    # A tensor on a mesh without process groups is described from the side of the rank that wrote it.
    here = dist.is_initialized()
    writer, world = (dist.get_rank(), dist.get_world_size()) if here else (_seen_from(layout), None)
    return rebuild, (tensor._local.detach(), *where, tensor._local.requires_grad, is_parameter, state, writer, world)


def _seen_from(layout: Layout) -> int:
    """The rank from whose side a tensor on a mesh without process groups is described; -1 if it is not in the mesh."""
    ranks: list[int] = layout.mesh.mesh[layout.coord].flatten().tolist() if layout.coord is not None else []
    return ranks[0] if ranks else -1


def rebuild(
    local: torch.Tensor,
    mesh: MeshAsData,
    placements: Sequence[Placement],
    shape: Sequence[int],
    order: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
    state: dict[str, Any],
    writer: int | None = None,
    world: int | None = None,
) -> DTensor:
    """Undo `reduce`."""
    if dist.is_initialized() and writer is not None:  # else it is seen from the writer, or the pickle does not say it
        rank, size = dist.get_rank(), dist.get_world_size()
        if world is not None and size != world:  # the same text on all ranks, which is shown once
            raise DTensorError(
                f"a DTensor of rank {writer} of {world} cannot be unpickled in a world of {size}: its other parts are "
                f"in another world. {_INSTEAD}"
            )
        if not _hold_the_same(rank, writer, mesh[1], placements):
            raise DTensorError(
                f"rank {rank} of {size} cannot unpickle a DTensor of rank {writer} of {world}: it is placed "
                f"{list(placements)} on the ranks {mesh[1]}, and this is not rank {rank}'s part. {_INSTEAD}"
            )
    layout = Layout.of(mesh_from_data(mesh, writer), placements, shape, order)
    if layout.coord is not None and tuple(local.shape) != tuple(layout.local_shape):
        raise DTensorError(
            f"rank {dist.get_rank()}: this pickled local tensor has shape {tuple(local.shape)}, but this rank's part "
            f"of {layout} has {tuple(layout.local_shape)}, so another rank wrote it. {_INSTEAD}"
        )
    result = wrap(local.requires_grad_(requires_grad), layout)
    result.__dict__.update(state)
    if is_parameter:
        mark_as_parameter(result)
    return result


_INSTEAD = (
    "Send x.full_tensor(), and make a DTensor of it with distribute_tensor where it arrives; or save and load it with "
    "terrazzo.checkpoint, which loads onto any ranks"
)


def _hold_the_same(one: int, other: int, mesh: Any, placements: Sequence[Placement]) -> bool:
    """Whether two ranks hold the same part of a tensor that is placed so on a mesh of these ranks."""
    with real_values():
        ranks = torch.tensor(mesh, device="cpu")
        first, second = (ranks == one).nonzero().tolist(), (ranks == other).nonzero().tolist()
    if not first or not second:  # outside of the mesh
        return first == second
    return all(a == b or p.is_replicate() for a, b, p in zip(first[0], second[0], placements, strict=True))


links.reduce = reduce
torch.serialization.add_safe_globals([rebuild, Shard, Replicate, Partial, _strided_shard])
