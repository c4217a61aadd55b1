"""Threads of saves: results in order, errors when all is over, and also while the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo._threads import Worker, results_of
from terrazzo.checkpoint import (
    Checkpoint,
    CheckpointManager,
    DefaultStager,
    FileSystemWriter,
    async_save,
    load,
    save,
    verify,
)
from terrazzo.checkpoint.formats import HuggingFaceReader, HuggingFaceWriter
from terrazzo.checkpoint.formats.huggingface.layout import lay_out
from terrazzo.checkpoint.stores import Capabilities, LocalStore


def test_results_come_in_the_order_of_the_calls_and_threads_run_at_once() -> None:
    together = threading.Barrier(3, timeout=30)

    def call(number: int) -> int:
        together.wait()
        return number

    assert results_of([lambda number=number: call(number) for number in range(6)], 3, "test") == list(range(6))
    assert results_of([], 3, "test") == []


def test_an_error_is_raised_when_nothing_runs_any_more_and_nothing_new_begins() -> None:
    began, ended = [], []
    both = threading.Barrier(2, timeout=30)

    def fails() -> None:
        began.append("fails")
        both.wait()
        raise OSError("no room")

    def slow() -> None:
        began.append("slow")
        both.wait()
        time.sleep(0.1)
        ended.append("slow")

    with pytest.raises(OSError, match="no room"):
        results_of([fails, slow, lambda: began.append("third")], 2, "test")
    assert sorted(began) == ["fails", "slow"] and ended == ["slow"]


class SmallFiles(LocalStore):
    """A folder that is written as an object store is: several small files at once."""

    caps = Capabilities(in_place=False, file_bytes=1 << 16)


@pytest.mark.parametrize("several", ["threads", "files"])
def test_a_process_that_ends_completes_its_save(tmp_path: Path, several: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then executors take no more work: only threads can be started."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    state = {f"w{number}": torch.full((100, 100), float(number)) for number in range(8)}
    if several == "threads":
        future = async_save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=3), no_dist=True)
    else:
        future = async_save(state, store=SmallFiles(tmp_path), no_dist=True)
    future.result(60)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_worker_makes_calls_in_order_and_has_no_thread_without_them() -> None:
    go_on, done = threading.Event(), []
    with Worker("test") as worker:
        first = worker.submit(lambda: go_on.wait(30) and done.append(1))
        second = worker.submit(lambda: done.append(2))
        cancelled = worker.submit(lambda: done.append(3))
        assert cancelled.cancel() and not second.done()
        go_on.set()
    assert done == [1, 2] and first.done() and second.done()
    with pytest.raises(OSError, match="no room"):
        worker.submit(_fail).result(30)
    assert worker.submit(lambda: 7).result(30) == 7
    worker.wait()
    assert not any(thread.name == "test" for thread in threading.enumerate())


def _fail() -> None:
    raise OSError("no room")


class SlowFiles(LocalStore):
    """A folder of which several files are read at once, as of an object store."""

    caps = Capabilities(in_place=False, depth=4)


@pytest.mark.parametrize("what", ["a manager", "a stager", "many files"])
def test_what_is_done_while_the_interpreter_ends(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then executors take no more work, wherever a save or what follows it would use one."""
    weight = torch.arange(100.0)
    if what == "many files":
        save({"a": weight, "b": weight}, storage_writer=HuggingFaceWriter(tmp_path, make_layout=_small_files))
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    if what == "a manager":
        manager = CheckpointManager(tmp_path / "root", local=tmp_path / "local")
        manager.save(1, {"w": weight})
        manager.close()
        assert torch.equal(Checkpoint(tmp_path / "root" / "global_step1")["w"][...], weight)
    elif what == "a stager":
        stager = DefaultStager()
        async_save({"w": weight}, checkpoint_id=tmp_path, async_stager=stager, no_dist=True).result(60)
        stager.close()
        assert torch.equal(Checkpoint(tmp_path)["w"][...], weight)
    else:
        assert torch.equal(Checkpoint(HuggingFaceReader(SlowFiles(tmp_path)))["b"][...], weight)


def _small_files(tensors: Any) -> Any:
    return lay_out(tensors, 100)


def test_a_process_that_ends_saves_and_copies(tmp_path: Path) -> None:
    """It forgets to wait, and the save has not begun when its last line is done: all is there nevertheless."""
    program = f"""
import threading, time, torch
from concurrent.futures import thread as executors  # which ends before all else
from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.native import storage

def late(*arguments, write=storage.write_part, **named):
    while not executors._shutdown:
        time.sleep(0.01)
    return write(*arguments, **named)

storage.write_part = late
manager = CheckpointManager({str(tmp_path / "root")!r}, local={str(tmp_path / "local")!r}, async_op=True)
manager.save(1, {{"w": torch.arange(100.0)}})
assert threading.active_count() > 1
"""
    source = Path(terrazzo.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for place in ("local", "root"):
        path = tmp_path / place / "global_step1"
        assert torch.equal(Checkpoint(path)["w"][...], torch.arange(100.0)) and verify(path) == []
