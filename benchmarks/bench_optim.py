"""A step of an optimizer that needs whole matrices: ours on our DTensors, torch's on torch's, and on plain tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Budget, Implementations, Setting, case
from terrazzo.optim import Muon
from terrazzo.tensor import Shard, distribute_tensor


def _step(kind: type[torch.optim.Muon], matrices: list[Tensor], grads: list[Tensor]) -> Callable[[], None]:
    params = [nn.Parameter(matrix) for matrix in matrices]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer = kind(params)

    def step() -> None:
        optimizer.step()

    return step


def _compare(setting: Setting, shapes: list[tuple[int, int]]) -> Implementations:
    torch.manual_seed(0)
    mesh = init_device_mesh(setting.device.type, (setting.world,))
    matrices, grads = ([torch.randn(shape).to(setting.device) for shape in shapes] for _ in range(2))

    def ours(tensors: list[Tensor]) -> list[Tensor]:
        return [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]

    def theirs(tensors: list[Tensor]) -> list[Tensor]:
        return [torch_tensor.distribute_tensor(tensor, mesh, [torch_tensor.Shard(0)]) for tensor in tensors]

    return {
        "plain": _step(torch.optim.Muon, [m.clone() for m in matrices], [g.clone() for g in grads]),
        "terrazzo": _step(Muon, ours(matrices), ours(grads)),
        "torch": _step(torch.optim.Muon, theirs(matrices), theirs(grads)),
    }


@case(world=2, budget=Budget("time", 0.5), runs_on="both")
def muon_small(setting: Setting) -> Implementations:
    """24 matrices of 64 by 256: what the library and the messages cost."""
    return _compare(setting, [(64, 256)] * 24)


@case(world=2, budget=Budget("time", 0.8), repetitions=11, runs_on="both")
def muon(setting: Setting) -> Implementations:
    """8 matrices of 256 by 1024: what orthogonalising costs."""
    return _compare(setting, [(256, 1024)] * 8)
