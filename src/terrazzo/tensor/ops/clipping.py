"""`torch.nn.utils.clip_grad_norm_` over DTensors: local norms of all gradients at once, one reduction a mesh.

PyTorch's function takes a list, so no tensor subclass can see it as one operation; gradient by gradient it would cost a
reduction each, and fail where parameters live on different meshes. `terrazzo._torch.clipping` has it ask here.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.running import running


def clipping_norm(tensors: list[torch.Tensor], order: float, error_if_nonfinite: bool) -> torch.Tensor:
    """What PyTorch's clipping asks for, in place of its own loop over tensors."""
    with running("clip_grad_norm"):
        total = total_norm(tensors, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is not finite, so it cannot be clipped; to scale by it "
            "anyway, set error_if_nonfinite=False"
        )
    return total


def total_norm(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all tensors taken as one vector, replicated on the mesh of the first DTensor.

    Ranks outside a tensor's mesh hold none of it and see the norm of what they hold.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    first: Layout | None = None
    for t in tensors:
        if not isinstance(t, DTensor):
            groups.setdefault((None, ()), []).append(t)
            continue
        if t._layout.dual is not t._layout:
            t = t.redistribute(placements=t._layout.dual.placements)
        layout = t._layout
        first = first or layout
        groups.setdefault((layout.mesh, layout.varying), []).append(t._local)
    assert first is not None
    device = first.mesh.device_type
    norms = []
    for (mesh, dims), members in groups.items():
        norm = _local_norm(members, order).to(device)
        if dims:
            axis = axis_of(mesh, dims)
            if order == float("inf"):
                norm = all_reduce(norm, axis, "max")
            elif axis.size > 1:
                norm = all_reduce(norm**order, axis) ** (1.0 / order)
        norms.append(norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    return wrap(total, Layout.of(first.mesh, (Replicate(),) * len(first.mesh_shape), ()))


def _local_norm(members: list[torch.Tensor], order: float) -> torch.Tensor:
    held = [t for t in members if t.numel()]
    if not held:
        return members[0].new_zeros(())
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for t in held:
        by_kind.setdefault((t.device, t.dtype), []).append(t)
    norms: list[torch.Tensor] = []
    for same in by_kind.values():
        norms.extend(torch._foreach_norm(same, order))
    device = norms[0].device
    return torch.linalg.vector_norm(
        torch.stack([n.to(device) for n in norms]) if len(by_kind) > 1 else torch.stack(norms), order
    )
