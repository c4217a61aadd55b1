"""Turns at the interpreter's lock are short while a save runs, and then as they were."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from terrazzo.checkpoint import FileSystemWriter, Metadata, async_save
from terrazzo.checkpoint.run.background import Background
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


def test_a_save_that_is_interrupted_restores_the_interval(tmp_path: Path, interval: float) -> None:
    """As debuggers and notebooks do it: an exception that appears in the thread from outside."""
    writer = Waiting(tmp_path)
    future = async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert writer.writes.wait(30)
    (thread,) = [each for each in threading.enumerate() if each.name == "terrazzo-save"]
    asked = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    assert asked == 1
    writer.go_on.set()
    assert future.exception(30) is not None
    thread.join(30)
    assert sys.getswitchinterval() == interval


def test_a_thread_that_ended_inside_does_not_keep_turns_short(interval: float) -> None:
    inside = short_turns()
    thread = threading.Thread(target=inside.__enter__)
    thread.start()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    with short_turns():
        pass
    assert sys.getswitchinterval() == interval
    inside.__exit__(None, None, None)
    assert sys.getswitchinterval() == interval


def test_a_forked_process_has_its_own_interval(interval: float) -> None:
    with short_turns():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == interval else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_a_saving_process_leaves_the_interval_alone(tmp_path: Path, interval: float) -> None:
    seen: list[float] = []
    background = Background()
    background.start(lambda: seen.append(sys.getswitchinterval()) or Metadata({})).result(30)
    background.wait()
    assert seen == [interval]
