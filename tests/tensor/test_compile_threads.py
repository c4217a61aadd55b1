"""While a program is captured, other threads train and read its tensors as ever."""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import terrazzo
from ranks import run_ranks
from terrazzo.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

LOGGER = logging.getLogger("captured")
WEIGHT = torch.ones(4)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class Model(nn.Module):
    """Tensors of all kinds: of modules and globals, in lists, written; as DTensors and plain."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.spread = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        self.plain = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))
        self.listed = [torch.randn(4, requires_grad=True)]
        self.noticed = torch.tensor(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOGGER.info("begins")
        self.calls += 1
        spread = self.spread.to_local(grad_placements=[Shard(0)])
        x = Multiply.apply(x @ spread, self.plain) * self.listed[0] * WEIGHT
        assert type(self.plain) is nn.Parameter and type(self.calls) is torch.Tensor
        LOGGER.info("ends")
        return x * self.calls


def train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in [*model.parameters(), model.listed[0]]:
            p -= 0.1 * p.grad
            p.grad = None


class Meetings(logging.Handler):
    """Wherever the program logs while it is captured, it waits until another thread has made a step."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self.step, self.steps, self.errors = step, 0, []
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._captures = threading.get_ident()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def handle(self, record: logging.LogRecord) -> bool:  # without the lock: the other thread logs, too, meanwhile
        if threading.get_ident() == self._captures:
            self._asked.put(True)
            self._done.get(timeout=60)
        return True

    def _run(self) -> None:
        while self._asked.get():
            try:
                self.step()
                self.steps += 1
            except BaseException as error:
                self.errors.append(error)
            self._done.put(None)

    def end(self) -> None:
        self._asked.put(False)
        self.thread.join()


def beside() -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    model = Model(mesh)
    alone = copy.deepcopy(model)
    x = torch.randn(3, 4)
    slots = {name: vars(DTensor)[name] for name in ("_local", "_layout", "_memo")}

    def step() -> None:
        for tensor in (*model.parameters(), *model.buffers(), *model.listed, model.spread.to_local(), WEIGHT):
            assert type(tensor) in (torch.Tensor, nn.Parameter, DTensor), type(tensor)
            assert "Fake" not in repr(tensor)
        train(model, x)
        model.noticed = torch.tensor(2.0 + meetings.steps)  # not undone, and no effect of the program

    meetings = Meetings(step)
    LOGGER.addHandler(meetings)
    LOGGER.setLevel(logging.INFO)
    try:
        fast = terrazzo.compile(model, backend="aot_eager", fullgraph=True)
        fast(x)
    finally:
        LOGGER.removeHandler(meetings)
        meetings.end()
    assert meetings.errors == [] and meetings.steps >= 4
    for _ in range(meetings.steps):
        train(alone, x)
    alone(x)
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected)
    assert model.noticed == 1.0 + meetings.steps
    # The graph has all gradients.
    for run in (fast, alone):
        run(x).sum().backward()
    for name in ("spread", "plain"):
        torch.testing.assert_close(getattr(model, name).grad, getattr(alone, name).grad)
    torch.testing.assert_close(model.listed[0].grad, alone.listed[0].grad)
    assert len(terrazzo.compile_report(fast).graphs) == 1
    assert {name: vars(DTensor)[name] for name in slots} == slots


def test_other_threads_train_while_a_program_is_captured():
    run_ranks(1, beside)
