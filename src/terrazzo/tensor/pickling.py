"""DTensors in pickles and in `torch.save` files, also those that are loaded with `weights_only=True`.

A pickle holds the local tensor and, as plain data, the ranks of the mesh and the placements. It can be loaded by the
same rank of the same mesh; to load onto others, use `terrazzo.checkpoint`. The mesh is not pickled as an object,
because its hash differs between processes, so the loaded mesh would not equal the live one.

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
    writer = dist.get_rank() if dist.is_initialized() else _seen_from(layout)
    return rebuild, (tensor._local.detach(), *where, tensor._local.requires_grad, is_parameter, state, writer)


def _seen_from(layout: Layout) -> int:
    """The rank from whose side a tensor on a mesh without process groups is described."""
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
) -> DTensor:
    """Undo `reduce`."""
    layout = Layout.of(mesh_from_data(mesh, writer), placements, shape, order)
    if layout.coord is not None and tuple(local.shape) != tuple(layout.local_shape):
        raise DTensorError(
            f"rank {dist.get_rank()}: this pickled local tensor has shape {tuple(local.shape)}, but this rank's part "
            f"of {layout} has {tuple(layout.local_shape)}, so another rank wrote it; use terrazzo.checkpoint to load "
            "on other ranks"
        )
    result = wrap(local.requires_grad_(requires_grad), layout)
    result.__dict__.update(state)
    if is_parameter:
        mark_as_parameter(result)
    return result


links.reduce = reduce
torch.serialization.add_safe_globals([rebuild, Shard, Replicate, Partial, _strided_shard])
