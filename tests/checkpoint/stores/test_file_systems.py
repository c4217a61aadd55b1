"""File systems beside one another, and some as network file systems are: no locks, no links, late news."""

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
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import terrazzo
from terrazzo.checkpoint import Checkpoint, CheckpointManager, FileSystemWriter, load, save, verify
from terrazzo.checkpoint.formats import DCPWriter, HuggingFaceWriter
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.errors import CheckpointError
from terrazzo.tensor import Shard, distribute_tensor

_HELPERS = Path(__file__).parent, Path(__file__).parents[2]  # of programs that import this file


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


def with_mounts(folder: Path, *command: str) -> str:
    """What a command prints that may mount file systems, which only it sees."""
    done = subprocess.run(
        ["unshare", "--mount", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (Path(terrazzo.__file__).parents[1], *_HELPERS)))},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_its_host(mounts: list[str], writers: list[type]) -> None:
    """Save and load among ranks, each of which sees the folder through a mount of its own."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    at, columns = Path(mounts[rank]), slice(rank * 20, rank * 20 + 20)

    def sharded(number: int, dim: int) -> Any:
        return distribute_tensor(torch.arange(40_040.0).reshape(1001, 40) + number, mesh, [Shard(dim)])

    for writer in writers:
        for number in range(3):
            save({"x": sharded(number, 0)}, storage_writer=writer(at / writer.__name__))
            target = sharded(-1, 1)
            load({"x": target}, checkpoint_id=at / writer.__name__, together=True)
            assert target.to_local().equal(sharded(number, 0).full_tensor()[:, columns])
    with CheckpointManager(at / "run", keep=2, reuse=True) as manager:
        for step in range(4):
            manager.save(step, {"x": sharded(step, 0), "frozen": torch.ones(100_000)})
        target = {"x": sharded(-1, 1), "frozen": torch.zeros(100_000)}
        manager.restore("latest", target)
        assert target["x"].to_local().equal(sharded(3, 0).full_tensor()[:, columns]) and target["frozen"].eq(1).all()
        manager.wait()
        assert manager.steps() == [2, 3]


def on_fuse() -> None:
    """Runs in a mount namespace of its own."""
    from fuse_folder import mounted

    from terrazzo.testing import run_ranks

    everything = [FileSystemWriter, DCPWriter, HuggingFaceWriter]
    for name, options in {"usual": {}, "plain": {"plain": True}, "cached": {"cached": 2}}.items():
        Path(name).mkdir()
        with mounted(name, f"{name}-0", **options) as first, mounted(name, f"{name}-1", **options) as second:
            # A file that keeps its name is taken for replaced while the host remembers the one before.
            run_ranks(2, on_its_host, [first, second], everything[:2] if name == "cached" else everything)
    Path("full").mkdir()
    with mounted("full", "full-0", room=4 << 20) as at:
        for writer in everything:
            save({"x": torch.ones(50_000)}, storage_writer=writer(Path(at, writer.__name__)), no_dist=True)
        for writer in everything:
            try:
                save({"x": torch.zeros(2_000_000)}, storage_writer=writer(Path(at, writer.__name__)), no_dist=True)
            except CheckpointError as error:
                assert "No space left" in str(error)
            else:
                raise AssertionError(writer)
    print("done")


@pytest.mark.long
def test_two_hosts_that_mount_a_folder_which_shows_changes_late(tmp_path: Path) -> None:
    """The kernel's caches, locks and errors of a file system over FUSE; the folder itself is looked at afterwards."""
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("there is no FUSE")
    program = "import test_file_systems; __name__ == '__main__' and test_file_systems.on_fuse()"
    assert with_mounts(tmp_path, sys.executable, "-c", program) == "done\n"
    for name in ("usual", "plain", "cached"):
        for step in (2, 3):
            assert verify(tmp_path / name / "run" / f"global_step{step}") == []
        assert verify(tmp_path / name / "FileSystemWriter") == [] and verify(tmp_path / name / "DCPWriter") == []
        left = [path for path in tmp_path.rglob("*") if path.name.endswith((".lease", ".lock", ".tmp"))]
        assert left == []
    for writer in ("FileSystemWriter", "DCPWriter", "HuggingFaceWriter"):
        assert Checkpoint(tmp_path / "full" / writer)["x"][...].eq(1).all()


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
    there = str(Path(__file__).parent)
    assert with_mounts(tmp_path, "sh", "-c", script, sys.executable, program, there) == "[1, 4]\n"
    target = state(0)
    load(target, checkpoint_id=run / "global_step4")
    assert target["step"] == 4 and not (run / "global_step2").exists()
