"""`torch.nn.utils.clip_grad_norm_` over DTensors: local norms of all gradients at once, one reduction a mesh.

PyTorch's function takes a list, so no tensor subclass can see it as one operation; gradient by gradient it would cost a
reduction each, and fail where parameters live on different meshes. Its inner functions, which compute the total norm
and scale by it, are replaced by ones that ask first whether there are DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from terrazzo.comm.axis import axis_of
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.accumulate import join_norms
from terrazzo.tensor.ops.foreach import local_norms


def install() -> None:
    """Let PyTorch's clipping, and its public function for the norm alone, compute the norm of DTensors at once."""
    clip_grad._get_total_norm = _over_dtensors(clip_grad._get_total_norm)
    torch.nn.utils.get_total_norm = clip_grad._get_total_norm
    clip_grad._clip_grads_with_norm_ = _of_both_kinds(clip_grad._clip_grads_with_norm_)
    torch.nn.utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_


def _over_dtensors(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not any(type(t) is DTensor for t in found) or norm_type <= 0:
            return plain(found, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            total = total_norm(found, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is not finite, so it cannot be clipped; to "
                "scale by it "
                "anyway, set error_if_nonfinite=False"
            )
        return total

    get_total_norm.__doc__ = plain.__doc__
    return get_total_norm


def _of_both_kinds(plain: Callable[..., None]) -> Callable[..., None]:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        others = [p for p in found if type(p.grad) is not DTensor]
        if type(total_norm) is not DTensor or not others:
            plain(found, max_norm, total_norm, foreach)
            return
        # The norm is the same number on every rank, but a plain gradient cannot be multiplied by a DTensor in place.
        plain([p for p in found if type(p.grad) is DTensor], max_norm, total_norm, foreach)
        plain(others, max_norm, total_norm.full_tensor(), foreach)

    clip_grads_with_norm_.__doc__ = plain.__doc__
    return clip_grads_with_norm_


def total_norm(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all tensors taken as one vector, replicated on the mesh of the first DTensor.

    Ranks outside a tensor's mesh hold none of it and see the norm of what they hold.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    first: Layout | None = None
    for t in tensors:
        if type(t) is not DTensor:
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
        parts = local_norms(members, order)
        if any(part.device.type != device for part in parts):
            parts = [part.to(device) for part in parts]
        norm = torch.linalg.vector_norm(torch.stack(parts), order)
        norms.append(join_norms(norm, order, axis_of(mesh, dims)) if dims else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return wrap(total.to(dtype.to_real()), Layout.of(first.mesh, (Replicate(),) * len(first.mesh_shape), ()))
