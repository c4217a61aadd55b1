"""The total norm of gradients, and scaling by it: these functions take lists, which no tensor subclass can override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.declared import like, private, replace

_WHY = "clip_grad_norm_ of DTensors takes one reduction per mesh, also where parameters are on several"
_INNER = "torch.nn.utils.clip_grad._get_total_norm"
_OUTER = "torch.nn.utils.get_total_norm"
_plain: Any = private(_INNER, _WHY, patched=True)
private(_OUTER, _WHY, patched=True)

_WHY_SCALE = "plain and distributed gradients are scaled by one norm"
_INNER_SCALE = "torch.nn.utils.clip_grad._clip_grads_with_norm_"
_OUTER_SCALE = "torch.nn.utils.clip_grads_with_norm_"
_plain_scale: Any = private(_INNER_SCALE, _WHY_SCALE, patched=True)
private(_OUTER_SCALE, _WHY_SCALE, patched=True)


def install(is_ours: type, total_norm: Callable[[list[torch.Tensor], float, bool], torch.Tensor]) -> None:
    """Call `total_norm(tensors, order, error_if_nonfinite)` if a tensor of class `is_ours` is among the tensors."""

    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        if not isinstance(tensors, (torch.Tensor, list, tuple)):
            tensors = list(tensors)
        found = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not any(isinstance(t, is_ours) for t in found) or norm_type <= 0:
            return _plain(tensors, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            return total_norm(list(found), float(norm_type), error_if_nonfinite)

    like(get_total_norm, _plain)
    replace(_INNER, get_total_norm)
    replace(_OUTER, get_total_norm)

    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        if not isinstance(total_norm, is_ours):
            return _plain_scale(parameters, max_norm, total_norm, foreach)
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        others = [p for p in found if not isinstance(p.grad, is_ours)]
        # The norm is the same number on every rank, but a plain gradient cannot be multiplied by a DTensor in place.
        _plain_scale([p for p in found if isinstance(p.grad, is_ours)], max_norm, total_norm, foreach)
        if others:
            full: Any = total_norm
            _plain_scale(others, max_norm, full.full_tensor(), foreach)
        return None

    like(clip_grads_with_norm_, _plain_scale)
    replace(_INNER_SCALE, clip_grads_with_norm_)
    replace(_OUTER_SCALE, clip_grads_with_norm_)
