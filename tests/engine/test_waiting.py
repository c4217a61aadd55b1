"""A step asks the device for nothing: the host goes on without waiting, but for one decision per step in 16 bits."""

from __future__ import annotations

import os
from collections import Counter
from traceback import extract_stack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import terrazzo
from engine.runs import engine_of, train
from ranks import run_ranks
from terrazzo.engine import Engine
from terrazzo.tensor import DTensor

STEPS = 3
PACKAGE = os.path.join(os.path.dirname(terrazzo.__file__), "")
TESTING = os.path.join(PACKAGE, "testing", "")

# What makes a number of a tensor, and what has a result whose size depends on values.
WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


class Waits(TorchDispatchMode):
    """Counts, by the line of terrazzo's that asks, what a host would have to wait for."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.lines = engine, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside is seen here
        if func in WAITING and not self._counts_steps(args[0]):
            ours = [frame for frame in extract_stack() if frame.filename.startswith(PACKAGE)]
            stack = [frame for frame in ours if not frame.filename.startswith(TESTING)]  # which calls the test
            self.lines[f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "the test"] += 1
        return func(*args, **(kwargs or {}))

    def _counts_steps(self, tensor: torch.Tensor) -> bool:
        """Optimizers count their steps in tensors that are always on the CPU."""
        return any(tensor is state.get("step") for state in self.engine.optimizer.state.values())


def waits(stage: int, **options: Any) -> Counter:
    engine = engine_of(stage, gradient_accumulation_steps=2, gradient_clipping=0.1, **options)
    train(engine, 1)  # layouts are agreed about once
    with Waits(engine) as seen:
        losses = train(engine, STEPS, start=1)
    assert engine.global_steps == STEPS + 1 and 0.1 < engine.get_global_grad_norm()
    assert seen.lines.pop("the test") == len(losses)  # which are asked for
    return seen.lines


def check_waits() -> None:
    for stage in (0, 1, 2, 3):
        assert waits(stage) == Counter(), stage
        assert waits(stage, bf16={"enabled": True, "check_grad_overflow": False}) == Counter(), stage
        for precision in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
            half = waits(stage, **precision)
            assert list(half.values()) == [STEPS], (stage, half)
            assert all("gradients.py" in line for line in half)
    assert waits(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}) == Counter()


def test_what_a_step_waits_for():
    run_ranks(2, check_waits)
