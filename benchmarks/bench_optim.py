"""A step of an optimizer that needs whole matrices: ours on our DTensors, torch's on torch's, and on plain tensors; and
one whose state is in files."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Budget, Implementations, Setting, case
from benchmarks.measure import extra_memory
from terrazzo.engine import Engine, initialize
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


def _with_files(setting: Setting) -> tuple[Engine, Callable[[], None]]:
    """A model with ten times as much state as the buffers take: 40 matrices, of which 4 have their state in memory."""
    width = 64 if setting.quick else 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(40)))
    offload = {"device": "nvme", "nvme_path": str(setting.folder), "buffer_count": 4, "buffer_size": 1}
    zero = {"stage": 1, "offload_optimizer": offload}
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine = initialize(model, config={"train_batch_size": setting.world, "zero_optimization": zero, "optimizer": adam})

    def step() -> None:
        assert engine.pages is not None
        engine.pages.step()

    for p in engine.module.parameters():
        p.grad = torch.zeros_like(p)
    return engine, step


@case(unit="times", repetitions=1, budget=Budget("value", 3))
def nvme_memory(setting: Setting) -> Implementations:
    """The most memory that three steps take, with the first, which makes the state; over that of the buffers, which is
    a tenth of the state."""

    def memory() -> float:
        engine, step = _with_files(setting)
        extra = extra_memory(lambda: [step() for _ in range(3)])
        state = sum(v.nbytes for each in engine.optimizer.state.values() for v in each.values() if v.ndim)
        return extra * 1e6 / (state / 10)

    return {"terrazzo": memory}


@case(unit="times", repetitions=5)
def nvme_time(setting: Setting) -> Implementations:
    """The time of a step, over that of one whose state is in memory."""
    engine, step = _with_files(setting)
    step()
    parts = [nn.Parameter(p.detach().to_local().clone()) for p in engine.module.parameters()]
    for p in parts:
        p.grad = torch.zeros_like(p)
    plain = torch.optim.AdamW(parts, lr=1e-3)
    plain.step()
    return {"terrazzo": lambda: _seconds(step) / _seconds(plain.step)}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
