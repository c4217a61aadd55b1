"""The total norm of gradients: PyTorch's function takes a list, so no tensor subclass sees it as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.declared import like, private, replace

_WHY = "clip_grad_norm_ of DTensors takes one reduction a mesh, also where parameters live on several"
_INNER = "torch.nn.utils.clip_grad._get_total_norm"
_OUTER = "torch.nn.utils.get_total_norm"
_plain: Any = private(_INNER, _WHY, patched=True)
private(_OUTER, _WHY, patched=True)


def install(is_ours: type, total_norm: Callable[[list[torch.Tensor], float, bool], torch.Tensor]) -> None:
    """Have `total_norm(tensors, order, error_if_nonfinite)` called where a tensor of class `is_ours` is among them."""

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
