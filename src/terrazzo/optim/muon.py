"""Muon for sharded matrices: each matrix is orthogonalised once, by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import OptimError
from terrazzo.optim.owners import Owners
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import wrap


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for sharded parameters, with the same arguments and results.

    The momentum is sharded, and saved, as the parameters are. Each matrix has one rank, its owner, that receives the
    whole update and orthogonalises it; the matrices are divided among the ranks so that their costs are balanced. A
    parameter group takes two all-to-alls in bfloat16. Otherwise each product of each matrix would take an all-gather.

    Parameters may be sharded by `fully_shard`, by tensor parallelism, by both, or not at all. As in PyTorch they must
    be matrices: use another optimizer for biases and embeddings.

    >>> from terrazzo.fsdp import fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 3, bias=False))
    >>> optimizer = Muon(model.parameters(), lr=0.1)
    >>> model(torch.randn(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owners: dict[tuple[Any, ...], Owners] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [_gradient(p) for p in params]
        for p, grad in zip(params, grads, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad)
        momenta = [_local(self.state[p]["momentum_buffer"]) for p in params]
        lr, momentum = float(group["lr"]), group["momentum"]
        local_grads = [_local(grad) for grad in grads]
        torch._foreach_lerp_(momenta, local_grads, 1 - momentum)
        updates = list(torch._foreach_lerp(local_grads, momenta, momentum)) if group["nesterov"] else momenta
        updates = [_placed_as(update, p) for update, p in zip(updates, params, strict=True)]

        owners = self._owners_of(params)
        # The iteration itself runs in bfloat16, so nothing is lost by sending in it.
        wholes = owners.gather(updates, torch.bfloat16)
        coefficients, steps, eps = group["ns_coefficients"], group["ns_steps"], group["eps"]
        orthogonal = {i: orthogonalised(whole, coefficients, steps, eps) for i, whole in wholes.items()}
        results = [
            _local(x).to(p.device) for x, p in zip(owners.scatter(orthogonal, torch.bfloat16), params, strict=True)
        ]

        locals_ = [_local(p) for p in params]
        torch._foreach_mul_(locals_, 1 - lr * group["weight_decay"])
        for p, local, result in zip(params, locals_, results, strict=True):
            local.add_(result, alpha=-_adjusted(lr, group["adjust_lr_fn"], p.shape))

    def _owners_of(self, params: list[Tensor]) -> Owners:
        # Layouts are interned; a plain parameter is identified by its shape.
        key = tuple([p._layout if isinstance(p, DTensor) else p.shape for p in params])
        found = self._owners.get(key)
        if found is None:
            found = self._owners[key] = Owners(params, _cost)
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._owners = {}


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix with nearly the same singular vectors and singular values near 1, by the Newton-Schulz iteration.

    In bfloat16, with the same operations in the same order as PyTorch's Muon.

    >>> x = orthogonalised(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    >>> bool(((x.float().diag() - 1).abs() < 0.5).all())
    True
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)  # no singular value is larger than the Frobenius norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _cost(shape: torch.Size) -> float:
    """The cost of one step of the iteration: two products short by long side, and one of the short side squared."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))


def _adjusted(lr: float, how: str | None, shape: torch.Size) -> float:
    """The learning rate for a matrix of this shape."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def _gradient(p: Tensor) -> Tensor:
    """The gradient, redistributed to its parameter's placements."""
    grad = p.grad
    assert grad is not None
    if grad.is_sparse or p.is_complex():
        raise OptimError(f"Muon needs dense, real gradients, but a parameter of {p.dtype} has one of {grad.layout}")
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad._layout is not p._layout:
        return grad.redistribute(p.device_mesh, p.placements)
    return grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def _placed_as(local: Tensor, p: Tensor) -> Tensor:
    if not isinstance(p, DTensor):
        return local
    return wrap(local, p._layout)


__all__ = ["Muon", "orthogonalised"]
