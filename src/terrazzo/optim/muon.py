"""Muon for sharded matrices and batches of them: each matrix is orthogonalised once, by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from terrazzo._torch.modules import state_maker_of
from terrazzo.errors import OptimError, OptimValueError
from terrazzo.layout import Shard
from terrazzo.optim.owners import Owners
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import wrap
from terrazzo.tensor.redistribute import redistribute_local


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for sharded parameters, with the same arguments and results.

    The momentum is sharded, and saved, as the parameters are. Each matrix has one rank, its owner, that receives the
    whole update and orthogonalises it; the matrices are divided among the ranks so that their costs are balanced. A
    parameter group takes two all-to-alls in bfloat16. Otherwise each product of each matrix would take an all-gather.

    Parameters may be sharded by `fully_shard`, by tensor parallelism, by both, or not at all. One of more than two dims
    is a batch of matrices, such as experts, which the last two dims are; each rank gets some of them whole, without
    communication if it has them already. Use another optimizer for biases and embeddings, or
    `MuonWithAuxAdam`.

    >>> from terrazzo.fsdp import fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 3, bias=False))
    >>> optimizer = Muon(model.parameters(), lr=0.1)
    >>> model(torch.randn(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__([torch.zeros(1, 1, device="cpu")], *args, **kwargs)  # which takes matrices only
        torch.optim.Optimizer.__init__(self, params, self.defaults)
        self._check()
        self._owners: dict[tuple[Any, ...], Owners] = {}

    def _check(self) -> None:
        groups = [group for group in self.param_groups if group.get("use_muon", True)]
        for p in (p for group in groups for p in group["params"] if p.ndim < 2):
            raise OptimValueError(
                f"Muon needs matrices, or batches of them, but got a parameter of shape {tuple(p.shape)}: use another "
                "optimizer for it, or MuonWithAuxAdam"
            )

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

        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        single = [i for i, p in enumerate(params) if p.ndim == 2]
        own = self._of_matrices([params[i] for i in single], [updates[i] for i in single], how)
        results = dict(zip(single, own, strict=True))
        results |= {i: _of_batch(updates[i], how) for i, p in enumerate(params) if p.ndim > 2}

        locals_ = [_local(p) for p in params]
        torch._foreach_mul_(locals_, 1 - lr * group["weight_decay"])
        for i, (p, local) in enumerate(zip(params, locals_, strict=True)):
            local.add_(results[i].to(p.device), alpha=-_adjusted(lr, group["adjust_lr_fn"], p.shape[-2:]))

    def _of_matrices(self, params: list[Tensor], updates: list[Tensor], how: Any) -> list[Tensor]:
        """This rank's parts of the orthogonalised updates of matrices."""
        if not params:
            return []
        owners = self._owners_of(params)
        # The iteration itself runs in bfloat16, so nothing is lost by sending in it.
        wholes = owners.gather(updates, torch.bfloat16)
        orthogonal = {i: orthogonalised(whole, *how) for i, whole in wholes.items()}
        return [_local(x) for x in owners.scatter(orthogonal, torch.bfloat16)]

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


class MuonWithAuxAdam(Muon):
    """Muon for some param groups, and AdamW for the others: each group says with `use_muon` which one it is.

    Args:
        param_groups: Groups with `params`, `use_muon`, and the arguments of `Muon` or of `torch.optim.AdamW`. What a
            group does not have is lr 0.02, momentum 0.95 and weight_decay 0 for Muon, and lr 3e-4, betas (0.9, 0.95),
            eps 1e-10 and weight_decay 0 for AdamW, as in the class of this name by the author of Muon.

    >>> layer = torch.nn.Linear(4, 3)
    >>> matrices = {"params": [layer.weight], "use_muon": True, "lr": 0.1}
    >>> optimizer = MuonWithAuxAdam([matrices, {"params": [layer.bias], "use_muon": False}])
    >>> layer(torch.randn(2, 4)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[layer.weight]), sorted(optimizer.state[layer.bias])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        groups = []
        for number, group in enumerate(param_groups):
            if not isinstance(group, dict) or not isinstance(group.get("use_muon"), bool):
                raise OptimValueError(f"param group {number} must have `use_muon`, True or False")
            groups.append({**(_defaults_of_muon() if group["use_muon"] else _adam().defaults), **group})
        torch.optim.Optimizer.__init__(self, groups, {})
        self._owners = {}
        self._check()

    def _step(self, group: dict[str, Any]) -> None:
        if group["use_muon"]:
            super()._step(group)
        else:
            self._adam_of(group).step()

    def _adam_of(self, group: dict[str, Any]) -> torch.optim.AdamW:
        # No attribute: an optimizer that has optimizers inside cannot be copied without its parameters.
        adam = _adam()
        adam.param_groups, adam.state = [group], self.state
        return adam

    def _init_group(self, group: Any, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> bool:
        """Create the state of a group's parameters; PyTorch's optimizers have this method, too."""
        if group["use_muon"]:
            return super()._init_group(group, params, grads, momenta)
        return bool(state_maker_of(self._adam_of(group))(group, params, grads, [], [], [], []))


def _adam() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.zeros(1, device="cpu")], 3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)


def _defaults_of_muon() -> dict[str, Any]:
    return torch.optim.Muon([torch.zeros(1, 1, device="cpu")], lr=0.02, momentum=0.95, weight_decay=0.0).defaults


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix, or each of a batch, with nearly the same singular vectors and singular values near 1.

    By the Newton-Schulz iteration in bfloat16, with the same operations in the same order as PyTorch's Muon.

    >>> x = orthogonalised(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    >>> bool(((x.float().diag() - 1).abs() < 0.5).all())
    True
    """
    a, b, c = coefficients
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.bfloat16()
    x = x.mT if tall else x
    if x.ndim > 2:
        x, multiply = x.flatten(0, -3), cast(Any, torch.baddbmm)
        norm = x.norm(dim=(-2, -1), keepdim=True)
    else:
        norm, multiply = x.norm(), cast(Any, torch.addmm)
    x = x / norm.clamp(min=eps)  # no singular value is larger than the Frobenius norm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).view(matrix.shape)


def _of_batch(update: Tensor, how: Any) -> Tensor:
    """This rank's part of an orthogonalised batch of matrices, of which each rank gets some whole."""
    if not isinstance(update, DTensor):
        return orthogonalised(update, *how)
    placements = [Shard(0)] * update.device_mesh.ndim
    some = wrap(update.to_local().bfloat16(), update._layout).redistribute(placements=placements)
    return redistribute_local(orthogonalised(_local(some), *how), some._layout, update._layout)


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


__all__ = ["Muon", "MuonWithAuxAdam", "orthogonalised"]
