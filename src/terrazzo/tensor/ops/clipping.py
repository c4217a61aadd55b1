"""`torch.nn.utils.clip_grad_norm_` over DTensors: the local norms of all gradients at once, one reduction per mesh.

PyTorch's function takes a list, so a tensor subclass does not see it as one operation. Gradient by gradient it would
need a reduction for each, and fail where parameters are on different meshes. `terrazzo._torch.clipping` makes PyTorch's
function call this one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.accumulate import join_norms
from terrazzo.tensor.ops.foreach import local_norms
from terrazzo.tensor.running import running


def clipping_norm(tensors: list[torch.Tensor], order: float, error_if_nonfinite: bool) -> torch.Tensor:
    """The total norm for PyTorch's clipping, in place of its own loop over tensors."""
    with running("clip_grad_norm"):
        total = total_norm(tensors, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is not finite, so it cannot be clipped; to scale by it "
            "anyway, set error_if_nonfinite=False"
        )
    return total


def total_norm(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all tensors as one vector, replicated on the mesh of the first DTensor.

    Ranks outside a tensor's mesh hold none of it, and get the norm of what they hold.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    first: Layout | None = None
    for t in tensors:
        if not isinstance(t, DTensor):
            groups.setdefault((None, ()), []).append(t)
            continue
        if t._layout.dual is not t._layout:
            t = t.redistribute(placements=t._layout.dual.shown)
        layout = t._layout
        first = first or layout
        groups.setdefault((layout.mesh, layout.varying), []).append(t._local)
    assert first is not None
    device = first.mesh.device_type
    norms = []
    for (mesh, dims), members in groups.items():
        parts = local_norms(members, order)
        if any(part.device.type != device for part in parts):
            parts = [part.to(device) for part in parts]
        norm = torch.linalg.vector_norm(torch.stack(parts), order)
        norms.append(join_norms(norm, order, axis_of(mesh, dims)) if dims else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return wrap(total.to(dtype.to_real()), Layout.of(first.mesh, (Replicate(),) * len(first.mesh_shape), ()))
