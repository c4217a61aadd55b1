"""Two file systems, and one that does what network file systems do: no locks, no hard links, coarse dates."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.checkpoint import Checkpoint, CheckpointManager, load, save, verify
from terrazzo.checkpoint.stores import LocalStore


class NetworkSystem:
    """`os` as on a mounted network file system of which not much can be expected."""

    def __init__(self, locks: int | None = errno.ENOLCK) -> None:
        self._locks = locks
        self._date = int(time.time())  # all of a test is within one unit

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def flock(self, fd: int, how: int) -> None:
        if self._locks is not None:
            raise OSError(self._locks, os.strerror(self._locks))
        fcntl.flock(fd, how)

    def link(self, source: Any, target: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source))

    def fsync(self, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        os.fsync(fd)

    def stat(self, path: Any) -> os.stat_result:
        found = os.stat(path)
        return os.stat_result((*found[:8], self._date, self._date))


def state(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(3000.0), "w": torch.full((5,), float(step)), "step": step}


def check(manager: CheckpointManager, which: int | str, expected: int) -> None:
    target = {"frozen": torch.zeros(3000), "w": torch.zeros(5), "step": 0}
    manager.restore(which, target)
    assert target["w"].eq(expected).all() and target["frozen"].equal(state(0)["frozen"])


@pytest.mark.parametrize("locks", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_a_run_on_a_network_file_system(tmp_path: Path, locks: int | None) -> None:
    store = LocalStore(tmp_path / "run", NetworkSystem(locks))
    for first in (1, 4):
        with CheckpointManager(store, keep=2, best="loss", reuse=True) as manager:
            if first > 1:
                check(manager, "latest", 3)
            for step in range(first, first + 3):
                manager.save(step, state(step), {"loss": 1.0})
    assert manager.steps() == [5, 6], "the newest of equal ones is the best"
    for step in (5, 6):
        assert verify(tmp_path / "run" / f"global_step{step}") == []
    left = {path.name for path in tmp_path.rglob("*") if path.name.endswith((".lease", ".lock", ".tmp"))}
    assert left == set(), left


def test_a_step_that_is_replaced_within_the_unit_of_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest then has the date of the one before, and here the size, too."""
    seconds = count(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    store = LocalStore(tmp_path, NetworkSystem())
    with CheckpointManager(store, best="loss") as manager, CheckpointManager(store, best="loss") as reader:
        for step, loss in ((1, 0.5), (2, 0.7)):
            manager.save(step, state(step), {"loss": loss})
        manager.wait()
        reader.reload()
        assert reader.best_step() == 1
        before = store.beneath("global_step2").stat("manifest.terrazzo")
        check(manager, 1, 1)
        manager.save(2, state(2), {"loss": 0.3})
        for each in (manager, reader):
            each.wait()
            assert each.best_step() == 2 and [record.metrics["loss"] for record in each.records()] == [0.5, 0.3]
        assert store.beneath("global_step2").stat("manifest.terrazzo") == before


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A folder of another file system than `tmp_path`."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    made = memory / f"terrazzo-{os.getpid()}"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


def test_what_is_shared_is_written_again_on_another_file_system(tmp_path: Path, other: Path) -> None:
    """No file can be linked there, and none is renamed from one to the other."""
    save(state(1), checkpoint_id=tmp_path / "base")
    save(state(2), checkpoint_id=other / "next", base=tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "gone")
    assert verify(other / "next") == [] and Checkpoint(other / "next")["frozen"][...].equal(state(0)["frozen"])
    for root, local in ((tmp_path / "root", other / "local"), (other / "root", tmp_path / "local")):
        with CheckpointManager(root, local=local, keep=1, keep_local=1, reuse=True) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(step))
            manager.wait()
            check(manager, "latest", 3)
        assert verify(root / "global_step3") == [] and manager.latest_step() == 3


@pytest.mark.long
def test_a_file_system_that_is_mounted_in_a_run(tmp_path: Path) -> None:
    """A step that is a mount point is read, and neither replaced nor removed; others beside it are."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    program = """
import sys, torch
sys.path[:0] = sys.argv[1:2]
from test_file_systems import CheckpointManager, check, state
with CheckpointManager("run", keep=1) as manager:
    check(manager, 1, 1)
    for step in (3, 4):
        manager.save(step, state(step))
print(manager.steps())
"""
    script = 'mount -t tmpfs none run/global_step1 && cp -r kept/. run/global_step1/ && exec "$0" -c "$1" "$2"'
    (run / "global_step1").rename(tmp_path / "kept")
    (run / "global_step1").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, program, str(Path(__file__).parent)],
        env=os.environ | {"PYTHONPATH": str(Path(terrazzo.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr}")
    assert done.stdout == "[1, 4]\n", done.stderr
    target = state(0)
    load(target, checkpoint_id=run / "global_step4")
    assert target["step"] == 4 and not (run / "global_step2").exists()
