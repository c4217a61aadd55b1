"""The life of a run's checkpoints: saved, kept, removed, restored, on ranks that decide together."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, load, save
from terrazzo.checkpoint.manager import Best, Keep, Save
from terrazzo.checkpoint.manager.records import read_reasons
from terrazzo.checkpoint.stores import Entry, LocalStore, MemoryStore, Place, Store
from terrazzo.errors import (
    CheckpointError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointManagerError,
    CheckpointNotFoundError,
    DivergentValueError,
)
from terrazzo.launch import Stopped, StopSignal

pytestmark = pytest.mark.on_late

LIMIT = timedelta(seconds=20)


def state(step: int) -> dict:
    return {"model": {"w": torch.full((64, 8), float(step)), "b": torch.arange(5.0) + step}, "step": step}


def restored(manager: CheckpointManager, which: int | str) -> int:
    """Restores, and checks that every value is that of the step that it says."""
    target = state(-1)
    step = manager.restore(which, target)
    expected = state(step)
    assert target["step"] == step and all(torch.equal(target["model"][n], expected["model"][n]) for n in "wb")
    return step


def folders(root: str | Path) -> list[int]:
    names = [name for name in os.listdir(root) if name.startswith("global_step")]
    return sorted(int(name.removeprefix("global_step")) for name in names)


def live(root: str, async_op: bool) -> tuple:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 5.0, 50: 4.0}
    with CheckpointManager(
        root, save=Save(steps=10, at=[3]), keep=Keep(last=2, steps=30), best="loss", async_op=async_op
    ) as manager:
        assert manager.latest_step() is None and manager.steps() == []
        with pytest.raises(CheckpointNotFoundError, match="it has none"):
            manager.restore("latest", state(0))
        # The metrics of the first rank count.
        saved = [s for s in range(1, 51) if manager.save(s, state(s), {"loss": losses.get(s, 9.0) + dist.get_rank()})]
        manager.wait()
        assert manager.latest_step() == 50 and manager.best_step() == 20
        assert {record.step: record.metrics for record in manager.records()} == {
            step: {"loss": losses[step]} for step in (20, 30, 40, 50)
        }
        assert [restored(manager, which) for which in ("latest", "best", 30)] == [50, 20, 30]
        with pytest.raises(CheckpointNotFoundError, match="it has 20, 30, 40, 50"):
            manager.restore(10, state(0))
        with pytest.raises(CheckpointManagerError, match="worst"):
            manager.restore("worst", state(0))
    with pytest.raises(CheckpointManagerError, match="closed"):
        manager.save(60, state(60))
    return saved, manager.steps(), (Path(root) / "latest").read_text()


@pytest.mark.parametrize("async_op", [True, False])
def test_a_run(tmp_path: Path, async_op: bool):
    for saved, steps, latest in run_ranks(2, live, str(tmp_path), async_op):
        assert saved == [3, 10, 20, 30, 40, 50] and steps == [20, 30, 40, 50] and latest == "global_step50"
    assert folders(tmp_path) == steps  # nothing is left of those that were removed
    assert json.loads((tmp_path / "kept.json").read_text()) == {
        "20": ["best by loss"], "30": ["every 30 steps"], "40": ["last 2"], "50": ["last 2", "newest"],
    }  # fmt: skip
    target = state(0)
    load(target, checkpoint_id=tmp_path)  # the folder of a run is what `latest` names
    assert target["step"] == 50


def test_a_run_that_goes_back(tmp_path: Path):
    with CheckpointManager(tmp_path, save=10) as manager:
        for step in range(10, 51):
            manager.save(step, state(step))
    with CheckpointManager(tmp_path, save=10, keep=2) as manager:
        assert manager.steps() == [10, 20, 30, 40, 50]
        with pytest.raises(CheckpointExistsError, match="has not restored"):  # another run, perhaps
            manager.save(20, state(20))
        assert restored(manager, 20) == 20
        assert not manager.save(20, state(20), force=True), "it is there"
        assert manager.save(30, {**state(30), "step": -30})
        manager.wait()
        # The newest is what was saved last, not what has the largest number.
        assert manager.latest_step() == 30 and manager.steps() == [30, 50]
        with pytest.raises(CheckpointExistsError, match="being read"), manager.hold(50):
            manager.save(50, state(50))
    opened = Checkpoint(tmp_path)
    assert opened["step"] == -30


def test_what_is_read_is_not_removed(tmp_path: Path):
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            if step == 1:
                manager.wait()
                held = manager.hold(1)
                store = held.__enter__()
        manager.wait()
        assert manager.steps() == [1, 3] and "being read" in (tmp_path / "kept.json").read_text()
        assert Checkpoint(store)["model.w"][...].eq(1).all()
        held.__exit__(None, None, None)
        manager.save(4, state(4))
        manager.wait()
        assert manager.steps() == [4] and folders(tmp_path) == [4]
        with pytest.raises(CheckpointNotFoundError), manager.hold(1):
            pass


def test_a_checkpoint_outlives_the_one_that_it_builds_on(tmp_path: Path):
    frozen = torch.randn(200, 1000)
    with CheckpointManager(tmp_path, keep=1, reuse=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"frozen": frozen, "step": torch.tensor(step)})
            manager.wait()
            sizes = [file.stat().st_nlink for file in tmp_path.glob("*/data-*")]
        assert folders(tmp_path) == [3] and len(sizes) == 2  # the first one's file, and its own
        target = {"frozen": torch.zeros(200, 1000), "step": torch.tensor(0)}
        assert manager.restore("latest", target) == 3
        assert torch.equal(target["frozen"], frozen) and target["step"] == 3


def test_what_others_have_saved_there(tmp_path: Path):
    """Checkpoints of the engine are like those of the manager; of what is none nothing is touched."""
    save(state(5), checkpoint_id=tmp_path / "global_step5")
    save(state(5), checkpoint_id=tmp_path / "mine")
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "global_step7" / "notes.txt").write_text("mine")
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "manifest.terrazzo").write_bytes(b"damaged")
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.steps() == [5] and restored(manager, "latest") == 5
        manager.save(6, state(6))
    assert folders(tmp_path) == [3, 6, 7] and (tmp_path / "mine").is_dir()
    assert (tmp_path / "global_step7" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "global_step3" / "manifest.terrazzo").read_bytes() == b"damaged"


@pytest.mark.parametrize(
    "said",
    [7, "", "[" * 100_000, "[1]", "{}", '{"saved": NaN}', '{"saved": 1, "metrics": {"loss": "low"}}', torch.zeros(2)],
)
def test_what_is_said_of_a_checkpoint_may_be_nonsense(tmp_path: Path, said: object, caplog: pytest.LogCaptureFixture):
    """Such a checkpoint is left where it is, and the others are used if the run says so."""
    save({**state(1), "checkpoint_manager": '{"saved": 5.0, "step": 99}'}, checkpoint_id=tmp_path / "global_step1")
    save({**state(2), "checkpoint_manager": said}, checkpoint_id=tmp_path / "global_step2")
    (tmp_path / "kept.json").write_bytes(b'{"\xff": ["x"]}')
    with CheckpointManager(tmp_path, keep=1) as manager:
        with pytest.raises(CheckpointError, match="global_step2 cannot be read, and it may be the newest"):
            manager.latest_step()
        assert manager.steps() == [1] and restored(manager, 1) == 1
        assert caplog.text.count("global_step2 cannot be read") == 1
        assert read_reasons(Place(tmp_path)) == {}
        manager.save(3, state(3))
    assert folders(tmp_path) == [2, 3]


class Skewed(CheckpointManager):
    """One whose clock says something else on each rank."""

    def save(self, *arguments: object, **options: object) -> bool:
        self._since -= 100.0 * dist.get_rank()
        return super().save(*arguments, **options)


def decide_together(root: str) -> None:
    with Skewed(f"{root}/clock", save=Save(seconds=90), timeout=LIMIT) as manager:
        assert not any(manager.save(step, state(step)) for step in range(5))
    with CheckpointManager(f"{root}/steps", timeout=LIMIT) as manager:
        with pytest.raises(DivergentValueError, match="rank 0: 1, rank 1: 2"):
            manager.save(1 + dist.get_rank(), state(1))
        assert manager.save(1, state(1))


def test_no_rank_decides_alone(tmp_path: Path):
    run_ranks(2, decide_together, str(tmp_path))


def told_to_end(root: str, by_file: bool) -> tuple:
    file = Path(root) / "stop"
    stop = StopSignal(file=file)
    ended = None
    with CheckpointManager(f"{root}/run", save=Save(first=True), stop=stop) as manager:
        saved = []
        for step in range(1, 10):
            dist.barrier()
            if step == 4 and dist.get_rank() == 1:
                if by_file:
                    file.touch()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier()
            if manager.save(step, state(step)):
                saved.append(step)
            if stop.ending:
                ended = step
                break
    with pytest.raises(Stopped) as stopped:
        stop.leave()
    return saved, ended, stopped.value.code, manager.latest_step()


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.cpu_only("signals are for the main thread")
def test_a_job_that_is_told_to_end_saves_the_same_step(tmp_path: Path, by_file: bool):
    assert run_ranks(2, told_to_end, str(tmp_path), by_file) == [([1, 5], 5, 143, 5)] * 2


class Exploding:
    """A state that cannot be had on one rank."""

    def __init__(self, where: int) -> None:
        self.where = where

    def state_dict(self) -> dict:
        if dist.get_rank() == self.where:
            raise ValueError("the data loader is gone")
        return {"n": 1}

    def load_state_dict(self, state_dict: dict) -> None:
        raise AssertionError


def make_when_saved(root: str, async_op: bool) -> list[int]:
    made = []

    def make(step: int) -> dict:
        made.append(step)
        if step == 4 and dist.get_rank() == 1:
            raise ValueError("no memory for the copy")
        return state(step)

    read: list[str] = []

    def read_it(store: Store) -> None:
        target = state(-1)
        load(target, store=store)
        read.append(f"{Path(store.location).name} {target['step']}")
        if dist.get_rank() == 1 and target["step"] == 2:
            raise ValueError("it does not fit")

    with CheckpointManager(root, save=2, async_op=async_op, timeout=LIMIT) as manager:
        assert [step for step in range(1, 4) if manager.save(step, partial(make, step))] == [2]
        with pytest.raises((CheckpointException, ValueError), match="no memory"):
            manager.save(4, lambda: make(4))
            manager.wait()
        if async_op and dist.get_rank() == 1:
            with pytest.raises(CheckpointException, match="no memory"):
                manager.wait()
        assert manager.save(6, lambda: make(6))
        assert manager.restore("latest", read_it) == 6
        with pytest.raises(CheckpointException, match="it does not fit"):
            manager.restore(2, read_it)
        assert read == ["global_step6 6", "global_step2 2"]
        with pytest.raises((CheckpointException, CheckpointManagerError), match="checkpoint_manager"):
            manager.save(8, lambda: {"checkpoint_manager": 1})
            manager.wait()
    assert manager.steps() == [2, 6]
    return made


@pytest.mark.parametrize("async_op", [True, False])
def test_a_state_is_made_only_for_steps_that_are_saved(tmp_path: Path, async_op: bool):
    assert run_ranks(2, make_when_saved, str(tmp_path), async_op) == [[2, 4, 6]] * 2


def fail(root: str, async_op: bool) -> list[str]:
    told = []
    with CheckpointManager(root, async_op=async_op, timeout=LIMIT) as manager:
        manager.save(1, state(1))
        for step in (2, 3):
            try:
                manager.save(step, {**state(step), "loader": Exploding(1)})
                manager.wait()
            except (CheckpointException, ValueError) as error:
                told.append(str(error))
                if async_op and dist.get_rank() == 1:  # it has raised at once; the others hear of it when they wait
                    with pytest.raises(CheckpointException, match="the data loader is gone"):
                        manager.wait()
        assert manager.save(3, state(3)) and restored(manager, "latest") == 3
        with pytest.raises(CheckpointManagerError, match="checkpoint_manager"):
            manager.save(4, {"checkpoint_manager": 1})
        assert restored(manager, "latest") == 3
    assert manager.steps() == [1, 3] and (Path(root) / "latest").read_text() == "global_step3"
    return told


@pytest.mark.parametrize("async_op", [True, False])
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path: Path, async_op: bool):
    for told in run_ranks(2, fail, str(tmp_path), async_op):
        assert len(told) == 2 and all("the data loader is gone" in text for text in told)


class FullDisk:
    """`os`, but `latest` cannot be written, or nothing be removed."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getattr__(self, name: str):
        return getattr(os, name)

    def replace(self, old: object, new: object) -> None:
        if self.fault == "latest" and str(new).endswith("latest"):
            raise OSError(28, "No space left on device")
        os.replace(old, new)

    def unlink(self, path: object) -> None:
        if self.fault == "unlink" and str(path).endswith("manifest.terrazzo"):
            raise OSError(5, "Input/output error")
        os.unlink(path)


def test_faults_after_the_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    system = FullDisk("latest")
    manager = CheckpointManager(LocalStore(tmp_path, system), keep=1)
    manager.save(1, state(1))
    with pytest.raises(CheckpointException, match="No space left"):
        manager.wait()
    assert restored(manager, "latest") == 1, "it is whole"
    system.fault = "unlink"
    manager.save(2, state(2))
    manager.wait()
    assert "could not be removed" in caplog.text and manager.steps() == [1, 2]
    system.fault = ""
    manager.save(3, state(3))
    manager.close()
    assert manager.steps() == [3] and folders(tmp_path) == [3]


def test_clocks_that_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with CheckpointManager(tmp_path) as manager:
        for step, now in ((1, 1e9), (2, 0.9e9), (3, 0.8e9)):
            with monkeypatch.context() as patch:
                patch.setattr("terrazzo.checkpoint.manager.manager.time.time", lambda now=now: now)
                manager.save(step, state(step))
        manager.wait()
        assert [record.step for record in manager.records()] == [1, 2, 3] and manager.latest_step() == 3


def test_a_store_in_memory():
    store = MemoryStore()
    with CheckpointManager(store, keep=2, best=Best("accuracy", "max")) as manager:
        for step in range(1, 6):
            manager.save(step, state(step), {"accuracy": -step})
    assert manager.steps() == [1, 4, 5] and manager.best_step() == 1
    assert sorted(store.folders()) == ["global_step1", "global_step4", "global_step5"]


def test_what_dead_runs_have_left(tmp_path: Path):
    """Of a save or a removal that was killed nothing stays; a reader that died holds nothing."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    (tmp_path / "global_step1" / "manifest.terrazzo").unlink()  # as a removal does first
    dead = tmp_path / "global_step9"
    dead.mkdir()
    (dead / "data-0123456789ab-00000.safetensors").write_bytes(b"half")
    (dead / "save-0123456789ab.lease").touch()
    (tmp_path / "global_step2" / "read-0123456789ab.lease").touch()
    time.sleep(0.01)
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.steps() == [2] and restored(manager, "latest") == 2
        manager.save(3, state(3))
    assert folders(tmp_path) == [3] and manager.steps() == [3]


def test_a_reader_renews_its_hold(monkeypatch: pytest.MonkeyPatch):
    """In a store as object stores are, where whether a holder lives is judged by the age of its lease."""
    monkeypatch.setattr(MemoryStore, "lease_seconds", 0.4)
    store = MemoryStore()
    with CheckpointManager(store, keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        with manager.hold(1) as held:
            names = {entry.key for entry in held.list("read-")}
            time.sleep(1.0)  # more than twice what a lease is good for
            manager.save(2, state(2))
            manager.wait()
            assert manager.steps() == [1, 2] and Checkpoint(held)["model.w"][...].eq(1).all()
            assert {entry.key for entry in held.list("read-")} == names, "the same lease, of a new date"
        assert held.list("read-") == []
        manager.save(3, state(3))
        manager.wait()
        assert manager.steps() == [3] and store.folders() == ["global_step3"]


def test_a_hold_that_cannot_be_renewed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(LocalStore, "lease_seconds", 0.4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.wait()
        with manager.hold(1) as held:
            lease = next(iter(tmp_path.glob("global_step1/read-*")))
            before = lease.stat()
            time.sleep(0.3)
            assert lease.stat().st_mtime > before.st_mtime and lease.stat().st_ino == before.st_ino, "still locked"
            assert not held.lease_ended(lease.name, 0.0)
            lease.unlink()
            time.sleep(0.3)
        assert "could not be renewed" in caplog.text


def test_a_hold_that_fails_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = LocalStore.list

    def failing(store: LocalStore, prefix: str = "") -> list[Entry]:
        if prefix == "remove-":  # by now the lease has been taken
            raise OSError("the server does not answer")
        return plain(store, prefix)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "list", failing)
            with pytest.raises(OSError, match="does not answer"), manager.hold(1):
                pass
        assert not list(tmp_path.glob("global_step1/read-*"))
        assert all(thread.name != "terrazzo-lease" for thread in threading.enumerate())


class SlowDisk:
    """`os`, but removing takes long."""

    def __getattr__(self, name: str):
        return getattr(os, name)

    def unlink(self, path: object) -> None:
        if "data-" in str(path) and dist.get_rank() == 0:
            time.sleep(3.0)
        os.unlink(path)


def remove_slowly(root: str) -> list[int]:
    with CheckpointManager(LocalStore(root, SlowDisk()), keep=1, timeout=timedelta(seconds=2)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
    return manager.steps()


@pytest.mark.long
@pytest.mark.cpu_only("takes long, and needs no device")
def test_a_removal_may_take_longer_than_the_time_limit(tmp_path: Path):
    assert run_ranks(2, remove_slowly, str(tmp_path)) == [[4], [4]]
    assert folders(tmp_path) == [4]


def trained(optimizer_of: Callable, folder: Path, first: int, last: int) -> list[float]:
    """The losses of some steps; a new process would have the same objects."""
    torch.manual_seed(first)
    model = torch.nn.Linear(4, 3)
    unused = torch.nn.Linear(2, 2)
    optimizer = optimizer_of([*model.parameters(), *unused.parameters()])
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    losses = []
    with CheckpointManager(folder) as manager:
        run = {"model": model, "parts": {"optimizer": optimizer}}
        if first > 1:
            assert manager.restore("latest", run) == first - 1
        for step in range(first, last + 1):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            manager.save(step, run)
    return losses


@pytest.mark.parametrize("momentum", ["AdamW", "SGD", "plain"])
def test_a_new_optimizer_gets_its_state(tmp_path: Path, momentum: str, caplog: pytest.LogCaptureFixture):
    """Its first step has not made it yet, so it does not name it."""

    def optimizer_of(parameters: list) -> torch.optim.Optimizer:
        if momentum == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.1)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if momentum == "SGD" else 0.0)

    expected = trained(optimizer_of, tmp_path / "alone", 1, 6)
    assert trained(optimizer_of, tmp_path / "two", 1, 3) + trained(optimizer_of, tmp_path / "two", 4, 6) == expected
    assert caplog.text == ""


class Notes:
    """Something whose dict grows."""

    def __init__(self) -> None:
        self.notes: dict = {}

    def state_dict(self) -> dict:
        return {"notes": self.notes}

    def load_state_dict(self, state_dict: dict) -> None:
        self.notes = state_dict["notes"]


def test_what_is_not_restored_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Keys that are numbers come back as numbers where the target has them; two that look the same are refused."""
    said = Notes()
    said.notes = {1: "one", 2: "two"}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"notes": said, "other": 1})
        manager.wait()
        known, new = Notes(), Notes()
        known.notes = {1: "", 2: ""}
        manager.restore(1, {"notes": known})
        assert known.notes == {1: "one", 2: "two"} and caplog.text == ""
        manager.restore(1, {"notes": new})
        assert new.notes == {} and "notes.notes.1, notes.notes.2" in caplog.text
        with pytest.raises(CheckpointException, match="notes.notes.1"):
            said.notes = {1: "one", "1": "text"}
            manager.save(2, {"notes": said})
            manager.wait()
