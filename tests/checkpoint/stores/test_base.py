"""Saving on the base of another checkpoint: what has not changed is not written again, and nothing needs the base."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, FileSystemWriter, async_save, load, save, verify
from terrazzo.checkpoint.native.commit import remove_leftovers
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores import Absent, LocalStore, MemoryStore, Request, Version
from terrazzo.errors import CheckpointError, CheckpointNotFoundError, CheckpointValueError
from terrazzo.tensor import Shard, distribute_tensor


def state(step: int) -> dict:
    """A large frozen part and a small one that is trained, as with LoRA."""
    frozen = {f"frozen.{n}": torch.arange(40_000.0).reshape(200, 200) + n for n in range(5)}
    frozen["frozen.t"] = (torch.arange(10_000.0).reshape(100, 100) * 3).t()
    return frozen | {"adapter": torch.full((30, 4), float(step)), "step": step, "text": "x" * 9000}


def check(path: Path, step: int) -> None:
    target = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in state(step).items()}
    load(target, checkpoint_id=path, no_dist=True)
    for name, value in state(step).items():
        same = torch.equal(target[name], value) if isinstance(value, torch.Tensor) else target[name] == value
        assert same, name
    assert verify(path) == []


def newly_written(path: Path, before: set[int]) -> int:
    files = [file.stat() for file in path.iterdir()]
    return sum(file.st_size for file in files if file.st_ino not in before)


def inodes(*paths: Path) -> set[int]:
    return {file.stat().st_ino for path in paths for file in path.iterdir()}


@pytest.mark.parametrize("compression", [False, True])
def test_a_run_that_changes_little_writes_little(tmp_path: Path, compression: bool) -> None:
    for step in range(4):
        path, base = tmp_path / str(step), tmp_path / str(step - 1)
        before = inodes(base) if step else set()
        writer = FileSystemWriter(path, compression=compression)
        save(state(step), storage_writer=writer, no_dist=True, base=base if step else None)
        check(path, step)
        if step:
            assert newly_written(path, before) < 40_000
            assert step == 1 or len(list(path.glob("data-*"))) <= 3  # what is hardly used is not kept
    shutil.rmtree(tmp_path / "0")
    shutil.rmtree(tmp_path / "2")
    check(tmp_path / "1", 1)
    check(tmp_path / "3", 3)


class Synced:
    """Keeps which files were made durable."""

    def __init__(self) -> None:
        self.files: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        self.files.add(os.fstat(fd).st_ino)


def test_what_the_base_did_not_make_durable_is_made_so(tmp_path: Path) -> None:
    base, system = tmp_path / "base", Synced()
    save(state(1), storage_writer=FileSystemWriter(base, sync_files=False), no_dist=True)
    store = LocalStore(tmp_path / "next", system)
    save(state(1), storage_writer=NativeWriter(store), no_dist=True, base=base)
    shared = inodes(base) & inodes(tmp_path / "next")
    assert shared and shared <= system.files


def test_on_the_base_of_what_is_being_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in range(4):
        before = inodes(path) if step else set()
        save(state(step), checkpoint_id=path, no_dist=True, base=path if step else None)
        check(path, step)
        assert not step or newly_written(path, before) < 40_000
    save(state(9), checkpoint_id=path, no_dist=True)
    assert len(os.listdir(path)) == 2
    async_save(state(10), checkpoint_id=path, no_dist=True, base=path).result()
    check(path, 10)


def test_on_a_base_whose_files_are_links(tmp_path: Path) -> None:
    """As in Hugging Face's cache, where a file is a link to a blob of its repository."""
    blobs, base = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0"
    save(state(0), checkpoint_id=blobs, no_dist=True)
    base.mkdir(parents=True)
    for file in blobs.iterdir():
        (base / file.name).symlink_to(f"../../blobs/{file.name}")
    before = inodes(blobs)
    for path in (tmp_path / "1", tmp_path / "hub" / "snapshots" / "1"):
        save(state(1), checkpoint_id=path, no_dist=True, base=base)
        assert newly_written(path, before) < 40_000
    shutil.rmtree(blobs)
    check(tmp_path / "1", 1)
    check(tmp_path / "hub" / "snapshots" / "1", 1)


class CleanedByAnother(LocalStore):
    """A folder that another save cleans just before this one commits."""

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        if key == MANIFEST:
            remove_leftovers(LocalStore(self.location))
        return super().put(key, data, only_if=only_if)


@pytest.mark.parametrize("place", ["elsewhere", "the same"])
def test_another_save_removes_no_file_of_the_base(tmp_path: Path, place: str) -> None:
    base = tmp_path / "base"
    path = base if place == "the same" else tmp_path / "run"
    save(state(0), checkpoint_id=base, no_dist=True)
    before = inodes(base)
    save(state(1), store=CleanedByAnother(path), no_dist=True, base=base)
    check(path, 1)
    assert newly_written(path, before) < 40_000
    check(base, 1 if path == base else 0)


def test_a_save_that_fails_leaves_no_file_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(0), checkpoint_id=tmp_path / "0", no_dist=True)
    monkeypatch.setattr(LocalStore, "upload", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(CheckpointError, match="full"):
        save(state(1), checkpoint_id=tmp_path / "1", no_dist=True, base=tmp_path / "0")
    assert list((tmp_path / "1").glob("data-*")) == []
    check(tmp_path / "0", 0)


def test_other_shapes_dtypes_and_compression_are_written(tmp_path: Path) -> None:
    save({"a": torch.zeros(8, 6), "b": torch.zeros(50_000)}, checkpoint_id=tmp_path / "0", no_dist=True)
    changed = {"a": torch.zeros(6, 8), "b": torch.zeros(50_000, dtype=torch.int32), "c": torch.zeros(0)}
    for compression in (False, True):
        writer = FileSystemWriter(tmp_path / "1", compression=compression)
        save(changed, storage_writer=writer, no_dist=True, base=tmp_path / "0")
        assert verify(tmp_path / "1") == []
        names = {file.name for file in (tmp_path / "0").glob("data-*")}
        assert not names & {file.name for file in (tmp_path / "1").iterdir()}


class Listening(LocalStore):
    """A folder that remembers which indexes are read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.indexes: list[str] = []

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in super().read(requests):
            self.indexes += [request.key] if request.key.startswith("index-") else []
            yield request


def save_on_base(path: str) -> tuple[list[str], int]:
    """The indexes of the base that this rank reads, where only one tensor of many has changed, or none is cut alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {f"w.{n}": torch.arange(32.0).reshape(8, 4) + n for n in range(400)}  # too many for an index in the root
    rows = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    save(rows, checkpoint_id=f"{path}/0")
    base, other = Listening(f"{path}/0"), Listening(f"{path}/0")
    save(rows | {"w.7": rows["w.7"] + 1}, checkpoint_id=f"{path}/1", base=base)
    save({n: distribute_tensor(w, mesh, [Shard(1)]) for n, w in whole.items()}, checkpoint_id=f"{path}/2", base=other)
    return base.indexes, len(other.indexes)


def test_a_rank_reads_the_indexes_of_its_own_chunks_only(tmp_path: Path) -> None:
    found = run_ranks(4, save_on_base, str(tmp_path))
    assert [len(indexes) for indexes, _ in found] == [1] * 4 and len({indexes[0] for indexes, _ in found}) == 4
    assert [others for _, others in found] == [0] * 4
    assert verify(tmp_path / "1") == verify(tmp_path / "2") == []
    checkpoint = Checkpoint(tmp_path / "1")
    for number in (0, 7, 399):
        expected = torch.arange(32.0).reshape(8, 4) + number + (number == 7)
        assert torch.equal(checkpoint[f"w.{number}"][...], expected)


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_a_file_of_the_base_with_another_size_is_written_again(tmp_path: Path, change: str) -> None:
    save(state(0), checkpoint_id=tmp_path / "0", no_dist=True)
    (file,) = (tmp_path / "0").glob("data-*")
    if change == "gone":
        file.unlink()
    else:
        os.truncate(file, 20_000 if change == "cut" else file.stat().st_size + 1)
    save(state(1), checkpoint_id=tmp_path / "1", no_dist=True, base=tmp_path / "0")
    check(tmp_path / "1", 1)


def test_where_files_cannot_be_shared_they_are_written(tmp_path: Path) -> None:
    save(state(0), checkpoint_id=tmp_path, no_dist=True)
    store = MemoryStore()
    save(state(0), store=store, no_dist=True, base=tmp_path)
    assert verify_store(store) == []
    with pytest.raises(CheckpointNotFoundError, match="base"):
        save(state(0), store=store, no_dist=True, base=tmp_path / "absent")
    assert verify_store(store) == [] and store.exists(MANIFEST)


def test_base_is_for_the_native_format(tmp_path: Path) -> None:
    from terrazzo.checkpoint.formats import DCPWriter

    with pytest.raises(CheckpointError, match="terrazzo's format"):
        save(state(0), storage_writer=DCPWriter(tmp_path), no_dist=True, base=tmp_path)


@pytest.mark.parametrize("url", ["s3:///folder", "nosuch://place/folder"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(CheckpointValueError):
        Checkpoint(url)
