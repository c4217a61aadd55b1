"""Two jobs on one path, and ranks of dead jobs that wake up: one wins, the other is told, nothing is destroyed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.checkpoint import DefaultSavePlanner, FileSystemWriter, load, save, verify
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.stores import LocalStore, MemoryStore
from terrazzo.errors import CheckpointError, ConflictError


class Sleeping(DefaultSavePlanner):
    """A job that falls asleep while it writes its data, until it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.wake = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.asleep.set()
        assert self.wake.wait(30)
        return super().resolve_data(write_item)


def value_at(path: Path) -> float:
    state = {"w": torch.zeros(100)}
    load(state, checkpoint_id=path)
    (value,) = set(state["w"].tolist())
    return value


def start_sleeper(path: Path, value: float) -> tuple[Sleeping, threading.Thread, list[Exception]]:
    planner, errors = Sleeping(), []

    def run() -> None:
        try:
            save({"w": torch.full((100,), value)}, checkpoint_id=path, planner=planner, no_dist=True)
        except CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert planner.asleep.wait(30)
    return planner, thread, errors


@pytest.mark.parametrize("there_was_one", [True, False])
def test_a_job_that_wakes_up_after_another_has_saved(tmp_path: Path, there_was_one: bool) -> None:
    if there_was_one:
        save({"w": torch.full((100,), 1.0)}, checkpoint_id=tmp_path)
    planner, thread, errors = start_sleeper(tmp_path, 2.0)
    before = set(os.listdir(tmp_path))
    save({"w": torch.full((100,), 3.0)}, checkpoint_id=tmp_path)
    assert {name for name in before if "manifest" not in name} - set(os.listdir(tmp_path)) <= {
        name for name in before if there_was_one and name.startswith("data-")
    }, "the files of the sleeper are not to be touched"
    assert any(name.endswith(".lease") for name in os.listdir(tmp_path))
    planner.wake.set()
    thread.join()
    (error,) = errors
    assert isinstance(error, ConflictError) and "replaced by another save" in str(error)
    assert value_at(tmp_path) == 3.0 and verify(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 2  # the loser took its own files away
    save({"w": torch.full((100,), 4.0)}, checkpoint_id=tmp_path)
    assert value_at(tmp_path) == 4.0


def test_two_jobs_at_once_many_times(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def job(value: float) -> None:
        for _ in range(15):
            try:
                save({"w": torch.full((100,), value)}, checkpoint_id=tmp_path, no_dist=True)
                outcomes.append("saved")
            except ConflictError:
                outcomes.append("conflict")

    threads = [threading.Thread(target=job, args=(float(value),)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 30 and outcomes.count("saved") >= 15, outcomes
    assert value_at(tmp_path) in (1.0, 2.0) and verify(tmp_path) == []
    save({"w": torch.zeros(100)}, checkpoint_id=tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def test_the_files_of_a_killed_job_are_removed_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    program = (
        "import sys, torch; sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "import test_fencing as t; from pathlib import Path\n"
        "t.start_sleeper(Path(sys.argv[1]), 5.0); print('asleep', flush=True); import time; time.sleep(60)"
    )
    source, here = Path(terrazzo.__file__).parents[1], Path(__file__).parent
    job = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(source), str(here)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == "asleep\n"
        theirs = {name for name in os.listdir(tmp_path) if name.startswith(("data-", "save-"))}
        assert len(theirs) == 2
        save({"w": torch.full((100,), 1.0)}, checkpoint_id=tmp_path)
        assert theirs <= set(os.listdir(tmp_path))
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    save({"w": torch.full((100,), 2.0)}, checkpoint_id=tmp_path)
    assert not theirs & set(os.listdir(tmp_path)) and value_at(tmp_path) == 2.0


class NoLocks:
    """A file system without locks, as some network ones are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def flock(self, fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")


def test_without_locks_the_age_of_files_decides(tmp_path: Path) -> None:
    class Writer(FileSystemWriter):
        def _open_store(self, path: Any) -> LocalStore:
            return LocalStore(path, NoLocks())

    planner, thread, errors = start_sleeper(tmp_path, 2.0)
    save({"w": torch.full((100,), 1.0)}, storage_writer=Writer(tmp_path))
    planner.wake.set()
    thread.join()
    assert isinstance(errors[0], ConflictError) and value_at(tmp_path) == 1.0
    stale = tmp_path / "save-0123456789ab.lease"
    for name in (stale.name, "data-0123456789ab-00000.safetensors"):
        (tmp_path / name).touch()
    save({"w": torch.full((100,), 3.0)}, storage_writer=Writer(tmp_path))
    assert stale.exists()
    for name in (stale.name, "data-0123456789ab-00000.safetensors"):
        os.utime(tmp_path / name, (1, 1))
    save({"w": torch.full((100,), 4.0)}, storage_writer=Writer(tmp_path))
    assert not stale.exists() and len(os.listdir(tmp_path)) == 2 and value_at(tmp_path) == 4.0


def test_an_unreadable_root_and_strange_files_are_not_cleaned_away(tmp_path: Path) -> None:
    (tmp_path / "data-0123456789ab-00000.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "manifest.terrazzo").write_bytes(b"garbage")
    with pytest.raises(ConflictError):  # somebody changes what is there during the save
        planner, thread, errors = start_sleeper(tmp_path, 1.0)
        (tmp_path / "manifest.terrazzo").write_bytes(b"other garbage")
        planner.wake.set()
        thread.join()
        raise errors[0]
    assert (tmp_path / "manifest.terrazzo").read_bytes() == b"other garbage"
    assert (tmp_path / "data-0123456789ab-00000.safetensors").exists() and (tmp_path / "notes.txt").exists()


def test_a_writer_of_a_store_has_no_other_place() -> None:
    store = MemoryStore()
    save({"w": torch.ones(2)}, storage_writer=NativeWriter(store))
    with pytest.raises(CheckpointError, match="cannot go to"):
        save({"w": torch.ones(2)}, storage_writer=NativeWriter(store), checkpoint_id="elsewhere")
    with pytest.raises(CheckpointError, match="cannot go to"):
        load({"w": torch.ones(2)}, storage_reader=NativeReader(store), checkpoint_id="elsewhere")
    state = {"w": torch.zeros(2)}
    load(state, storage_reader=NativeReader(store))
    assert state["w"].tolist() == [1, 1]
