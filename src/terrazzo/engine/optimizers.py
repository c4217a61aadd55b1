"""Optimizers that DeepSpeed has and PyTorch does not. Their parameters may be DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import EngineConfigError
from terrazzo.tensor import DTensor


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an interpolated gradient (Chen et al., 2023).

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, -1.0])
    >>> Lion([weight], lr=0.5).step()
    >>> weight.tolist()
    [-0.5, 0.5]
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p, grad in _trained(group):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(grad, 1 - second)
        return loss


class Lamb(torch.optim.Optimizer):
    """Adam with a learning rate per parameter, from the norms of the parameter and of its update (You et al., 2019).

    The norms are those of whole parameters, also if they are sharded.

    >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
    >>> weight.grad = torch.ones(4)
    >>> Lamb([weight], lr=0.5, betas=(0.0, 0.0)).step()     # moves by half of the parameter's norm
    >>> weight.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm or amsgrad:
            raise EngineConfigError("Lamb has no amsgrad, and for max_grad_norm use the config's gradient_clipping")
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        options |= {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, {**options, "eps_inside_sqrt": eps_inside_sqrt})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p, grad in _trained(group):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                mean = state["exp_avg"].lerp_(grad, 1 - first)
                square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                root = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt() + group["eps"]
                update = (mean / root).add_(p, alpha=group["weight_decay"])
                sizes = torch.stack([_norm(p), _norm(update)])
                ratio = (sizes[0] / sizes[1]).clamp(group["min_coeff"], group["max_coeff"])
                ratio = torch.where(sizes.ne(0).all(), ratio, torch.ones_like(ratio))
                rate = group["lr"]
                if group["bias_correction"]:
                    rate *= (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
                _local(p).sub_(_local(update) * (ratio * rate).to(_local(p).device))
        return loss


def _trained(group: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(p, p.grad) for p in group["params"] if p.grad is not None]


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _norm(tensor: Tensor) -> Tensor:
    """The norm of the whole tensor, on every rank."""
    norm = torch.linalg.vector_norm(tensor)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
