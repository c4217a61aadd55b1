"""Turns at the interpreter's lock are short while a save runs, and then as they were."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from terrazzo.checkpoint import FileSystemWriter, async_save
from terrazzo.checkpoint.run.turns import short_turns


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


class Waiting(FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.writes, self.go_on = threading.Event(), threading.Event()

    def write_data(self, plan, planner):
        self.writes.set()
        assert self.go_on.wait(30)
        return super().write_data(plan, planner)


@pytest.mark.parametrize("fails", [False, True])
def test_turns_are_short_while_a_save_runs(tmp_path: Path, interval: float, fails: bool) -> None:
    writer = Waiting(tmp_path)
    future = async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert writer.writes.wait(30) and sys.getswitchinterval() == pytest.approx(0.0005)
    if fails:
        writer.options = None
    writer.go_on.set()
    assert (future.exception(30) is not None) == fails
    assert sys.getswitchinterval() == interval


def test_of_several_saves_the_last_puts_the_interval_back(interval: float) -> None:
    with short_turns():
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("own", [0.0001, 0.01])
def test_an_interval_of_the_users_own_stays(own: float) -> None:
    with short_turns():
        sys.setswitchinterval(own)
    assert sys.getswitchinterval() == pytest.approx(own)
    sys.setswitchinterval(0.0001)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0001)  # shorter already
    assert sys.getswitchinterval() == pytest.approx(0.0001)
