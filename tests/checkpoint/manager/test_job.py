"""A run's folder has one live job, which has restored what was there before it saves, removes or moves `latest`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from datetime import timedelta
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo
from checkpoint.interleave import Pause, PausingStore, end_of, interleaved
from ranks import run_ranks
from terrazzo.checkpoint import CheckpointManager, load, save
from terrazzo.checkpoint.manager import job
from terrazzo.checkpoint.manager.job import JobLease
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Store
from terrazzo.engine import initialize
from terrazzo.errors import CheckpointExistsError, ConflictError
from warm_python import warm_python

LIMIT = timedelta(seconds=60)


def state(step: int) -> dict:
    return {"w": torch.full((6, 4), float(step)), "step": step}


def save_steps(root: Any, *steps: int) -> None:
    with CheckpointManager(root, keep=3) as manager:
        for step in steps:
            manager.save(step, state(step))


def contents(store: Store) -> dict[str, bytes]:
    found = {entry.key: bytes(store.get(entry.key)[0]) for entry in store.list()}
    for name in store.folders():
        found |= {f"{name}/{key}": data for key, data in contents(store.beneath(name)).items()}
    return found


# ------------------------------------------------------------------ a run that has not restored


def forget(root: Store | str) -> None:
    """Nothing is saved, removed or moved, for whatever step and with whatever arguments."""
    store = LocalStore(root) if isinstance(root, str) else root
    before = contents(store)
    told = r"has checkpoints of 3 steps \(80, 90, 100\), and this run has not restored any .* restore\('latest'"
    for options in ({"keep": 1}, {"save": 1000, "async_op": False}):
        manager = CheckpointManager(root, timeout=LIMIT, **options)
        for step in (1, 100, 200):  # an older one, the newest, a later one
            with pytest.raises(CheckpointExistsError, match=told):
                manager.save(step, state(-1))
        assert manager.latest_step() == 100
        manager.wait()
        manager.close()
    assert contents(store) == before


def go_on(root: Store | str) -> None:
    with CheckpointManager(root, keep=2, timeout=LIMIT) as manager:
        with pytest.raises(CheckpointExistsError, match="has not restored"):
            manager.save(101, state(101))
        target = state(0)
        assert manager.restore(90, target) == 90 and target["step"] == 90  # an older one on purpose
        assert manager.save(100, state(-100)) and manager.save(110, state(110))
    assert manager.steps() == [100, 110]
    read: list[int] = []

    def read_by_hand(store: Store) -> None:
        load(target, store=store)
        read.append(target["step"])

    with CheckpointManager(root, timeout=LIMIT) as manager:
        assert manager.restore("latest", read_by_hand) == 110 and read == [110]
        assert manager.save(120, state(120))
    assert manager.steps() == [100, 110, 120]


def test_a_run_that_forgets_to_restore_changes_nothing(tmp_path: Path):
    folder, store = tmp_path / "run", MemoryStore()
    for place in (folder, store):
        save_steps(place, *range(10, 101, 10))
    run_ranks(2, forget, str(folder))
    run_ranks(2, go_on, str(folder))
    forget(store)
    go_on(store)
    assert not (folder / "job.lease").exists() and not store.exists("job.lease")


def begin_anew(root: str) -> None:
    with CheckpointManager(root, keep=2, timeout=LIMIT) as manager:
        assert manager.latest_step() is None
        for step in (1, 2):
            assert manager.save(step, state(step))
        manager.wait()
        save(state(5), checkpoint_id=Path(root) / "global_step5")  # this job saves there in another way, too
        assert manager.save(6, state(6))
    assert manager.steps() == [5, 6]


def test_a_run_in_an_empty_folder_need_not_restore(tmp_path: Path):
    """A save that was killed has left a folder without a checkpoint; other files are no checkpoints either."""
    dead = tmp_path / "global_step1"
    dead.mkdir()
    (dead / "data-0123456789ab-00000.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    run_ranks(2, begin_anew, str(tmp_path))


def engine_of() -> Any:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return initialize(nn.Linear(4, 2), config=config)


def use_an_engine(root: str) -> None:
    for expected in (None, 1):
        engine = engine_of()
        with CheckpointManager(root, timeout=LIMIT) as manager:
            assert engine.load_step(manager)[0] == expected
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
            assert engine.save_step(manager)
            engine.save_checkpoint(root, "mine")  # of the same process
    with CheckpointManager(root, timeout=LIMIT) as manager:
        with pytest.raises(CheckpointExistsError, match="load_step"):
            engine_of().save_step(manager)
    assert manager.steps() == [1, 2]


def test_an_engine_that_loads_goes_on(tmp_path: Path):
    run_ranks(2, use_an_engine, str(tmp_path))


# ------------------------------------------------------------------ another live job

OTHER = """
import sys, torch
from terrazzo.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1])
if manager.steps():
    manager.restore("latest", {"w": torch.zeros(6, 4)})
manager.save(int(sys.argv[2]), {"w": torch.ones(6, 4), "step": 0})
manager.wait()
print("saved", flush=True)
sys.stdin.read()
"""


def other_job(root: Path, step: int) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(terrazzo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    program = root.parent / f"{root.name}-other.py"
    program.write_text(OTHER)
    command = [warm_python(), str(program), str(root), str(step)]
    other = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "saved\n"
    return other


def meet_a_live_job(root: str) -> None:
    with CheckpointManager(root, keep=1, timeout=LIMIT) as manager:
        assert manager.restore("latest", state(0)) == 7
        told = rf"used by another live job: process \d+ on {socket.gethostname()}, since 20\d\d-"
        with pytest.raises(ConflictError, match=told):
            manager.save(8, state(8))
        with pytest.raises(ConflictError, match="used by another live job"):
            engine_of().save_checkpoint(root)


def test_a_second_live_job_is_refused_and_a_dead_one_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = other_job(tmp_path, 7)
    copy = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    with monkeypatch.context() as patch:
        patch.setattr(job, "_SECONDS", 0.5)
        with CheckpointManager(copy) as manager:  # the job whose lease came with it is alive, but does not save here
            assert manager.restore("latest", state(0)) == 7 and manager.save(8, state(8))
    before = contents(LocalStore(tmp_path))
    run_ranks(2, meet_a_live_job, str(tmp_path))
    assert contents(LocalStore(tmp_path)) == before
    os.kill(int(LocalStore(tmp_path).get("job.lease")[0].split(b'"pid":')[1].split(b",")[0]), signal.SIGKILL)
    other.wait(60)
    other_job(tmp_path, 8).communicate("")  # at once; it ends without `close`
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore("latest", state(0)) == 8 and manager.save(9, state(9))
    assert manager.steps() == [7, 8, 9]
    assert not (tmp_path / "job.lease").exists()


class Elsewhere:
    """This process as one of another host, of which only its lease says that it is alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def take(self, lease: JobLease, name: str) -> bool:
        with self._patch.context() as patch:
            patch.setattr(job, "own_identity", lambda: f"{name} 1 2".encode())
            patch.setattr(job.socket, "gethostname", lambda: name)
            while not lease.take():
                pass
            return True


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_job_on_another_host(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever renews its lease is alive; who has died holds the next one up for as long as a lease lasts."""
    monkeypatch.setattr(job, "_SECONDS", 1.0)
    store, elsewhere = MemoryStore() if kind == "memory" else LocalStore(tmp_path), Elsewhere(monkeypatch)
    first, second, third = JobLease(store), JobLease(store), JobLease(store)
    assert elsewhere.take(first, "a.host")
    for _ in range(3):
        with pytest.raises(ConflictError, match="live job: process .* on a.host, since"):
            elsewhere.take(second, "b.host")
    first.check()
    first._over.set()  # it is dead, or suspended
    assert elsewhere.take(second, "b.host")
    with pytest.raises(ConflictError, match=r"has lost its lease .* taken by process .* on b\.host"):
        first.check()
    with pytest.raises(ConflictError, match="call restore"):
        first.take()
    first.release()
    second.check()
    second.release()
    assert not store.exists("job.lease")
    store.put("job.lease", b"\xff not JSON")  # of a later release, perhaps
    assert elsewhere.take(third, "c.host")
    store.delete(["job.lease"])
    with pytest.raises(ConflictError, match=r"job\.lease is gone"):
        third.check()


def test_of_two_jobs_one_gets_the_lease_whenever_the_other_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "_SECONDS", 0.4)
    elsewhere = Elsewhere(monkeypatch)

    def try_at(at: int) -> bool:
        store, leases = MemoryStore(), []

        def begin(name: str, pause: Pause) -> bool:
            leases.append(JobLease(PausingStore(store, pause)))
            return elsewhere.take(leases[-1], name)

        first, second, paused = interleaved(at, partial(begin, "a.host"), partial(begin, "b.host", Pause()))
        held = [end_of(lease.check) is None for lease in leases]
        assert sorted(held) == [False, True], (at, first, second)
        for lease in leases:
            lease.release()
        return paused

    assert len(list(takewhile(try_at, count()))) > 1


def lose_at(at: int) -> tuple[bool, bool]:
    """A job is suspended before an operation of a save, and another one goes on; whether it was, and got an error."""
    store, pause = MemoryStore(), Pause()
    late = CheckpointManager(PausingStore(store, pause), keep=1, async_op=False)
    late.save(1, state(1))
    late.save(2, state(2))
    late.wait()

    def save_late(after: Pause) -> None:
        pause.at = pause.count + after.at
        pause.reached, pause.go = after.reached, after.go
        late.save(3, state(3))
        late.wait()

    def take_over() -> tuple[CheckpointManager, bool]:
        manager = CheckpointManager(store, keep=4, async_op=False)
        manager.restore("latest", state(0))
        again = manager.save(3, state(-3))  # unless that is what it has restored
        for step in (10, 11):
            manager.save(step, state(step))
        manager.wait()
        return manager, again

    end, (other, again), paused = interleaved(at, save_late, take_over)
    # What it did after the other has come is an error, except for the end of a removal.
    assert end is None or isinstance(end, ConflictError), (at, end)
    with pytest.raises(ConflictError, match="has lost its lease of the folder"):
        late.save(4, state(4))
    late.close()
    assert bytes(store.get("latest")[0]) == b"global_step11", at
    other.reload()
    assert {3, 10, 11} <= {*other.steps()} and other.latest_step() == 11, at
    target = state(0)
    load(target, store=store.beneath("global_step3"))
    assert target["step"] == (-3 if again else 3), at
    other.close()
    return paused, end is not None


def test_a_job_that_loses_the_folder_leaves_it_as_it_is():
    trials = list(takewhile(lambda trial: trial[0], map(lose_at, count())))
    assert len(trials) > 20 and 5 < sum(failed for _, failed in trials) < len(trials)
