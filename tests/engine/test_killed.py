"""A run that is killed at any time, also while it saves, goes on from its last whole checkpoint with the same data."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from engine.runs import INPUTS, OUTPUTS, averaged, config, loss_of, make_model
from ranks import run_fresh, run_ranks
from terrazzo.checkpoint import verify
from terrazzo.engine import Engine, initialize

STEPS = 6


def engine_of(stage: int, seed: int = 0) -> Engine:
    """With 44 samples, so that steps of 8 come to the second pass in the middle of the sixth."""
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(44, INPUTS, generator=generator), torch.randn(44, OUTPUTS, generator=generator))
    options = config(stage, gradient_accumulation_steps=2)
    return initialize(make_model(seed), training_data=data, config=options)


def step(engine: Engine, batches: object) -> float:
    total = torch.zeros(())
    for _ in range(engine.gradient_accumulation_steps()):
        x, y = next(batches)
        total += engine.backward(loss_of(engine, x, y))
        engine.step()
    return averaged(total)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: str, stage: int, last: int, when: str) -> None:
    """Save after every step; after the last one, or in the one that follows, die."""
    engine = engine_of(stage)
    batches = iter(engine.training_dataloader)
    while True:
        step(engine, batches)
        ends = engine.global_steps == last
        if ends and when == "in a save":
            threading.Timer(0.005, die).start()
        saving = engine.save_checkpoint(folder, async_op=when == "in the background")
        if ends and when == "in the background":
            time.sleep(0.01)
            die()
        saving.result()
        if ends and when == "in the next step":
            x, y = next(batches)
            engine.backward(loss_of(engine, x, y))
            engine.step()
            die()


def finish(folder: str, stage: int, seed: int = 8) -> tuple[int, list[float]]:
    engine = engine_of(stage, seed)
    engine.load_checkpoint(folder)
    batches, start = iter(engine.training_dataloader), engine.global_steps
    return start, [step(engine, batches) for _ in range(STEPS - start)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank that nobody kills."""
    start, losses = run_ranks(1, finish, str(tmp_path_factory.mktemp("none")), 0, 0)[0]
    assert start == 0
    return losses


@pytest.mark.parametrize(
    ("stage", "last", "when"), [(2, 2, "in a save"), (3, 4, "in the background"), (1, 3, "in the next step")]
)
def test_a_killed_run_goes_on(tmp_path, uninterrupted, stage, last, when):
    outcomes = run_fresh(2, train_until_killed, str(tmp_path), stage, last, when, timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 2
    tag = (tmp_path / "latest").read_text()
    verify(Path(tmp_path) / tag)
    for world, other in ((4, 3), (2, 0), (1, 1)):
        for start, losses in run_ranks(world, finish, str(tmp_path), other):
            assert tag == f"global_step{start}"
            assert start == last or (start == last - 1 and when != "in the next step")
            close = torch.tensor(losses), torch.tensor(uninterrupted[start:])
            torch.testing.assert_close(*close, rtol=1e-5, atol=1e-5)
