"""What happens to gradients between backward and the optimizer: they are divided by the loss scale, and clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.nn.utils import get_total_norm

from terrazzo.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """Facts about a step's gradients."""

    norm: torch.Tensor  # before clipping, on the device
    overflow: bool  # if so, they cannot be used


def prepare_gradients(
    optimizer: torch.optim.Optimizer,
    *,
    scale: float,
    limit: float,
    may_overflow: bool,
    uncounted: Collection[torch.Tensor],
    combine: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Prepared:
    """Divide the gradients by the loss scale, and clip their norm.

    The host waits for the norm only where gradients may overflow, because then it decides whether to skip the step.

    Args:
        scale: the factor by which the gradients are too large.
        limit: the largest norm; 0 for no limit.
        may_overflow: whether to check for gradients that are not finite.
        uncounted: parameters whose gradients are not part of the norm.
        combine: computes the norm over all stages of a pipeline from this rank's norm; all of them must call it.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [p.grad for p in trained]
    factor: float | torch.Tensor = 1.0 / scale
    norm = _norm([p.grad for p in trained if p not in uncounted] if uncounted else gradients)
    if combine is not None:
        norm = combine(norm)
    norm = norm / scale
    if may_overflow and not math.isfinite(norm):
        return Prepared(norm, overflow=True)
    if limit:
        factor = factor * (limit / (norm + 1e-6)).clamp(max=1.0)
    if gradients and not (isinstance(factor, float) and factor == 1.0):
        locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if isinstance(factor, torch.Tensor):
            factor = factor.to(locals_[0].device, locals_[0].dtype)
        torch._foreach_mul_(locals_, factor)
    return Prepared(norm, overflow=False)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device="cpu")
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
