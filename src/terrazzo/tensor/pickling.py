"""DTensors in pickles and in `torch.save` files, also those that are loaded with `weights_only=True`.

A pickle holds the local tensor and, as plain data, the ranks of the mesh and the placements. It is for the same rank of
the same arrangement; `terrazzo.checkpoint` is what reads onto another. A mesh is not pickled as an object: the copy
would hash otherwise than the live mesh in another process, and would meet it as a stranger.
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
from terrazzo.tensor.dtensor import DTensor, wrap


def reduce(tensor: DTensor) -> tuple[Any, ...]:
    """What pickle is to store."""
    layout = tensor._layout
    state = {k: v for k, v in tensor.__dict__.items() if k != PARAMETER_MARK}
    is_parameter = bool(tensor.__dict__.get(PARAMETER_MARK))
    where = (mesh_as_data(layout.mesh), tuple(layout.placements), tuple(layout.shape), tuple(layout.order))
    return rebuild, (tensor._local.detach(), *where, tensor._local.requires_grad, is_parameter, state)


def rebuild(
    local: torch.Tensor,
    mesh: MeshAsData,
    placements: Sequence[Placement],
    shape: Sequence[int],
    order: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
    state: dict[str, Any],
) -> DTensor:
    """Undo `reduce`."""
    layout = Layout.of(mesh_from_data(mesh), placements, shape, order)
    if layout.coord is not None and tuple(local.shape) != tuple(layout.local_shape):
        raise DTensorError(
            f"rank {dist.get_rank()}: a pickled part of a DTensor has shape {tuple(local.shape)}, this rank's part of "
            f"{layout} has {tuple(layout.local_shape)}, so another rank wrote it; terrazzo.checkpoint loads on any rank"
        )
    result = wrap(local.requires_grad_(requires_grad), layout)
    result.__dict__.update(state)
    if is_parameter:
        mark_as_parameter(result)
    return result


torch.serialization.add_safe_globals([rebuild, Shard, Replicate, Partial])
