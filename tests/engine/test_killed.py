"""A run that is killed at any time, also while it saves, goes on from its last whole checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from engine.runs import engine_of, make_model, train, train_plainly
from ranks import run_fresh, run_ranks
from terrazzo.checkpoint import verify

STEPS = 6


def train_until_killed(folder: str, step: int, delay: float) -> None:
    engine = engine_of(2)
    engine.load_checkpoint(folder)
    while engine.global_steps < STEPS:
        train(engine, 1, start=engine.global_steps)
        saving = engine.save_checkpoint(folder, async_op=True)
        if engine.global_steps == step:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGKILL)
        saving.result()


def finish(folder: str, stage: int) -> tuple[int, list[float]]:
    engine = engine_of(stage, make_model(seed=8))
    engine.load_checkpoint(folder)
    start = engine.global_steps
    return start, train(engine, STEPS - start, start=start)


@pytest.mark.parametrize(("step", "delay"), [(2, 0.0), (4, 0.01)])
def test_a_killed_run_goes_on(tmp_path, step, delay):
    outcomes = run_fresh(2, train_until_killed, str(tmp_path), step, delay, timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 2
    tag = (tmp_path / "latest").read_text()
    verify(Path(tmp_path) / tag)
    expected = train_plainly(STEPS)[0]
    for world, stage in ((4, 3), (1, 1)):
        for start, losses in run_ranks(world, finish, str(tmp_path), stage):
            assert tag == f"global_step{start}" and start in (step - 1, step)
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[start:]), rtol=1e-5, atol=1e-5)
