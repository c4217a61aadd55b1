"""The lease of a save belongs to the process that took it, whatever the format that it writes."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import CheckpointManager, DefaultSavePlanner, FileSystemWriter, load, save
from terrazzo.checkpoint.formats import DCPWriter, HuggingFaceWriter
from terrazzo.checkpoint.native.commit import Commit, ended, sweep
from terrazzo.checkpoint.native.format import MANIFEST, lease_name
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.stores import Absent, LocalStore, MemoryStore, Version, local
from terrazzo.checkpoint.stores.fsspec_store import FsspecStore
from terrazzo.errors import ConflictError


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".lease"))


@pytest.mark.parametrize("kind", [FileSystemWriter, DCPWriter, HuggingFaceWriter])
def test_a_copy_of_a_writer_holds_no_lease(tmp_path: Path, kind: Any) -> None:
    writer = kind(tmp_path)
    writer.set_up_storage_writer(True)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, None, True)
    (plan,) = writer.prepare_global_plan([planner.create_local_plan()])
    held = leases(tmp_path)
    assert len(held) == 1
    for other in (pickle.loads(pickle.dumps(writer)), copy.deepcopy(writer)):
        other.reset()
        assert leases(tmp_path) == held, "a copy has let go of what it never held"
    later = kind(tmp_path)
    later.set_up_storage_writer(True)
    assert set(held) <= set(leases(tmp_path)), "a save that is alive keeps its files"
    later.reset()
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    _, metadata = planner.create_global_plan([plan])
    writer.finish(metadata, [results])
    assert leases(tmp_path) == []


class OthersFiles:
    """`os` as another user has it: files of some names are readable or not, and may be removed or not."""

    def __init__(self, *names: str, readable: bool = True, sticky: bool = False) -> None:
        self.names = names
        self.readable = readable
        self.sticky = sticky

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *mode: int) -> int:
        others = os.path.basename(path) in self.names and os.path.exists(path)
        if others and (flags & (os.O_RDWR | os.O_WRONLY) or not self.readable):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return os.open(path, flags, *mode)

    def unlink(self, path: Any) -> None:
        if self.sticky and os.path.basename(path) in self.names:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        os.unlink(path)


LEASE, DATA, OTHER = "save-0123456789ab.lease", "data-0123456789ab-00000.safetensors", "save-ba9876543210.lease"


def test_the_lease_of_another_user(tmp_path: Path) -> None:
    """Whether its holder is alive, the lock says if the file may be read, else its age."""
    held = LocalStore(tmp_path).lease(LEASE)
    may_read, may_not = (LocalStore(tmp_path, OthersFiles(LEASE, readable=readable)) for readable in (True, False))
    now = os.stat(tmp_path / LEASE).st_mtime
    assert not may_read.lease_ended(LEASE, 0.0) and not may_not.lease_ended(LEASE, now)
    assert may_not.lease_ended(LEASE, now - 2 * may_not.lease_seconds)
    held.release()
    (tmp_path / LEASE).touch()
    assert may_read.lease_ended(LEASE, now) and not may_not.lease_ended(LEASE, now)


@pytest.mark.parametrize("kind", [NativeWriter, DCPWriter, HuggingFaceWriter])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("readable", [True, False])
def test_what_another_users_save_left_stops_no_save(
    tmp_path: Path, kind: Any, readable: bool, sticky: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = (LEASE, OTHER, *([DATA] if kind is NativeWriter else []))
    for name in names:
        (tmp_path / name).touch()
    state = {"w": torch.arange(5.0)}
    store = LocalStore(tmp_path, OthersFiles(*names, readable=readable, sticky=sticky))
    save(state, storage_writer=kind(store))
    left = {name for name in (LEASE, OTHER) if (tmp_path / name).exists()}
    assert left == ({LEASE, OTHER} if sticky or not readable else set())
    assert ("left stays" in caplog.text) == (sticky and readable)
    target = {"w": torch.zeros(5)}
    load(target, checkpoint_id=tmp_path)
    assert target["w"].equal(state["w"])


@pytest.mark.parametrize("readable", [True, False])
def test_the_lock_that_another_user_left_stops_no_save(tmp_path: Path, readable: bool) -> None:
    lock = tmp_path / "manifest.terrazzo.lock"
    lock.touch()
    if not readable:  # then only its age says that its holder, who held it for one rename, is gone
        os.utime(lock, (0, 0))
    store = LocalStore(tmp_path, OthersFiles(lock.name, readable=readable))
    save({"w": torch.ones(2)}, store=store)
    assert not lock.exists() and (tmp_path / "manifest.terrazzo").exists()


class ReadOnly:
    """`os` for a file system that is mounted read-only, or belongs to another user."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any) -> None:
            raise OSError(self.number, os.strerror(self.number), *map(str, arguments[:1]))

        return refuse if name in ("unlink", "mkdir", "rmdir", "replace") else getattr(os, name)

    def open(self, path: Any, flags: int, *mode: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(self.number, os.strerror(self.number), str(path))
        return os.open(path, flags, *mode)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_place_that_cannot_be_written_to_is_read(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), float(step))})
    before = sorted(path for path in tmp_path.rglob("*"))
    if number != errno.ENOSPC:  # a reader that died, and a removal
        for name in ("read-0123456789ab.lease", "remove-0123456789ab.lease"):
            (tmp_path / "global_step2" / name).touch()
    with CheckpointManager(LocalStore(tmp_path, ReadOnly(number)), keep=1) as manager:
        for which in ("latest", 1, 2):
            target = {"w": torch.zeros(3)}
            step = manager.restore(which, target)
            assert target["w"].eq(step).all()
        with manager.hold("latest") as store:
            load(target, store=store)
    assert manager.latest_step() == 2 and caplog.text.count("what is read there is not held") == 1
    for name in ("read-0123456789ab.lease", "remove-0123456789ab.lease"):
        (tmp_path / "global_step2" / name).unlink(missing_ok=True)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_what_is_locked_after_it_was_looked_at_is_not_removed(tmp_path: Path) -> None:
    """A lease or a temporary file is created, and then locked; in between it looks like one that was left."""
    store, path = LocalStore(tmp_path), tmp_path / "save-0123456789ab.lease"
    path.touch()
    assert ended(store, store.list()) == [path.name]
    with path.open("r+") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        sweep(store, [path.name])
        assert path.exists()
    sweep(store, [path.name])
    assert not path.exists()


class WithoutLocks:
    """`os` for a file system that has no locks; and, if `keeps` is set, lets no file of that name be removed."""

    keeps = "-"

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def flock(self, fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def unlink(self, path: Any) -> None:
        if os.path.basename(path).startswith(self.keeps):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        os.unlink(path)


@pytest.mark.parametrize("kind", [NativeWriter, DCPWriter, HuggingFaceWriter])
@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_the_age_of_a_lease_is_by_the_clock_of_the_store(
    tmp_path: Path, kind: Any, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a host whose clock is hours ahead removes what a running save writes, nor keeps one that is behind it."""
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + ahead)
    state, system = {"w": torch.arange(5.0)}, WithoutLocks()
    for name in (names := [LEASE, *([DATA] if kind is NativeWriter else [])]):
        (tmp_path / name).touch()
    save(state, storage_writer=kind(LocalStore(tmp_path, system)))
    assert {path.name for path in tmp_path.iterdir()} >= set(names), "it runs on another host"
    for name in names:
        os.utime(tmp_path / name, (here() - 7200,) * 2)
    save(state, storage_writer=kind(LocalStore(tmp_path, system)))
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & set(names) and not any("clock" in name or "lease" in name for name in left), left


def test_a_file_whose_date_was_looked_at_does_not_stay(tmp_path: Path) -> None:
    state, system = {"w": torch.arange(5.0)}, WithoutLocks()
    (tmp_path / LEASE).touch()
    system.keeps = "clock"
    save(state, store=LocalStore(tmp_path, system))
    (left,) = tmp_path.glob("clock*")
    os.utime(left, (0, 0))
    system.keeps = "-"
    save(state, store=LocalStore(tmp_path, system))
    assert not list(tmp_path.glob("clock*")) and (tmp_path / LEASE).exists()


def test_a_file_system_without_dates_keeps_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.stores.fsspec_store._TIMES", ())
    store = FsspecStore("memory://leases/without/dates")
    store.prepare()
    store.put(LEASE, b"")
    store.put(DATA, b"half")
    save({"w": torch.arange(5.0)}, store=store)
    assert {LEASE, DATA} <= {entry.key for entry in store.list()}, "whether that save has ended is not known"


class Interrupted(LocalStore):
    """A folder at which Ctrl-C comes when a lock or a lease is to be removed."""

    def delete(self, keys: Iterable[str]) -> None:
        raise KeyboardInterrupt


def test_who_is_interrupted_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LOCK_SECONDS", 0.1)
    store, other = Interrupted(tmp_path), LocalStore(tmp_path)
    with pytest.raises(KeyboardInterrupt) as first, store.locked("root"):
        pass
    with pytest.raises(KeyboardInterrupt) as second, store.lease("save.lease"):
        assert not other.lease_ended("save.lease", 0.0)
    assert first.tb and second.tb, "a notebook keeps the error, with what has been at work"
    with other.locked("root"):
        pass
    assert other.lease_ended("save.lease", 0.0)


class Swept(MemoryStore):
    """Another save removes the lease just before it is renewed."""

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        if only_if is not None and key.endswith(".lease"):
            self.delete([key])
        return super().put(key, data, only_if=only_if)


def test_a_lease_that_was_removed_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.native.commit.RENEW_SECONDS", 0.0)
    for store in (MemoryStore(), Swept()):
        commit = Commit(store, MANIFEST)
        commit.hold("0123456789ab")
        before = store.list()
        commit.renew()
        if isinstance(store, Swept):
            assert commit.lost and store.list() == []
            store.put(lease_name("0123456789ab"), b"")  # whoever else does that
        else:
            (after,) = store.list()
            assert not commit.lost and after.modified > before[0].modified
            store.delete([lease_name("0123456789ab")])
        commit.renew()
        assert commit.lost and not commit.is_held()
        with pytest.raises(ConflictError, match="taken this one for dead"):
            commit.check_alive([], store.list())


def test_a_sweep_removes_no_file_that_has_come_in_between(tmp_path: Path) -> None:
    """Of two that find the lock of a dead process one is late: the other has removed it, and a third has its own."""
    path = tmp_path / "manifest.terrazzo.lock"
    path.touch()

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def flock(self, fd: int, operation: int) -> None:
            path.unlink()
            path.write_text("another process's")
            fcntl.flock(fd, operation)

    LocalStore(tmp_path, Late()).delete_ended([path.name])
    assert path.read_text() == "another process's"
