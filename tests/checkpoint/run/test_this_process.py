"""Saves and loads change no settings of the process that they run in, and leave no threads."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import (
    Checkpoint,
    CheckpointManager,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
    async_save,
    load,
    save,
    verify,
)
from terrazzo.checkpoint.formats import HuggingFaceWriter
from terrazzo.publish import Publisher


def test_a_save_and_a_load_leave_the_process_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    for module, name in [(sys, "setswitchinterval"), *((gc, name) for name in vars(gc))]:
        if name in ("setswitchinterval", "disable", "enable", "freeze", "unfreeze", "collect", "set_threshold"):

            def noted(*args: Any, name: str = name) -> None:
                changed.append(name)

            monkeypatch.setattr(module, name, noted)
    before, settings = threading.enumerate(), settings_of_process()
    state = {f"w.{number}": torch.ones(3) for number in range(50)} | {"values": list(range(10))}
    save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    async_save(state, checkpoint_id=tmp_path / "b", no_dist=True).result()
    load({name: torch.zeros(3) for name in state if name != "values"}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert Checkpoint(tmp_path / "a")["values"] == state["values"] and verify(tmp_path / "a") == []
    for thread in threading.enumerate():
        if thread.name == "terrazzo-save":
            thread.join(30)
    assert changed == [] and threading.enumerate() == before and settings_of_process() == settings


def settings_of_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return [handlers, sys.getswitchinterval(), gc.isenabled(), gc.get_threshold(), torch.get_num_threads(), os.getcwd()]


class Waiting(FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.writes, self.go_on = threading.Event(), threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        self.writes.set()
        assert self.go_on.wait(30)
        return super().write_data(plan, planner)


def test_a_save_whose_thread_is_interrupted_has_an_error(tmp_path: Path) -> None:
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
    assert not list(tmp_path.glob("data-*")) and not (tmp_path / "manifest.terrazzo").exists()


def test_a_path_is_the_same_folder_when_the_process_has_changed_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened by a relative path, or is being saved there, stays there."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    weights = {"w": torch.ones(300_000)}
    save(weights, checkpoint_id="saved")
    save(weights, storage_writer=HuggingFaceWriter("weights"))
    torch.save(weights, "file.pt")
    reader, whole = FileSystemReader("saved"), FileSystemWriter("whole")
    opened = [Checkpoint(name) for name in ("saved", "weights", "file.pt")]
    with CheckpointManager("run", local="local") as manager, Publisher("serve", weights) as publisher:
        future = async_save(weights, storage_writer=FileSystemWriter("later"))
        monkeypatch.chdir(second)
        future.result(60)
        manager.save(1, weights)
        publisher.publish()
        save(weights, storage_writer=whole)
        manager.wait()
        publisher.wait()
        manager.restore("latest", {"w": torch.zeros(300_000)})
        load({"w": torch.zeros(300_000)}, storage_reader=reader)
    for checkpoint in opened:
        assert checkpoint["w"][...].eq(1).all()
    assert not list(second.iterdir())
    made = sorted(each.name for each in first.iterdir())
    assert made == ["file.pt", "later", "local", "run", "saved", "serve", "weights", "whole"]
