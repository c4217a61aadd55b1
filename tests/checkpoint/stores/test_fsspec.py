"""File systems of fsspec: a process that is killed at any operation leaves the old checkpoint, or the new one."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from checkpoint.interleavings import played, wait_for_turn
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.formats import DCPWriter
from terrazzo.checkpoint.native.names import name_as_latest
from terrazzo.checkpoint.stores import ABSENT, Place, Store, Version, fsspec_store
from terrazzo.checkpoint.stores.fsspec_store import FsspecStore
from terrazzo.errors import CheckpointError, ConflictError


class Killed(BaseException):
    pass


class Renames(LocalFileSystem):
    """Its process is killed at operation `at`: a file is written by half, and from then on nothing happens."""

    cachable = False
    at = -1
    count = 0

    def _alive(self) -> bool:
        """Whether the process lives on after this operation."""
        self.count += 1
        if 0 <= self.at < self.count - 1:
            raise Killed
        return self.count - 1 != self.at

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        alive = self._alive()
        Path(path).write_bytes(value if alive else value[: len(value) // 2])
        if not alive:
            raise Killed

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not self._alive():
            raise Killed
        self._move(path1, path2)

    def _move(self, path1: str, path2: str) -> None:
        os.replace(path1, path2)

    def rm_file(self, path: str) -> None:
        if not self._alive():
            raise Killed
        super().rm_file(path)


class Copies(Renames):
    """As object stores do."""

    mv = AbstractFileSystem.mv

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.pipe_file(path2, Path(path1).read_bytes())


class Refuses(Renames):
    def _move(self, path1: str, path2: str) -> None:
        if os.path.exists(path2):
            raise FileExistsError(path2)
        os.rename(path1, path2)


class DoesNothing(Renames):
    def _move(self, path1: str, path2: str) -> None:
        if not os.path.exists(path2):
            os.rename(path1, path2)


def save_native(store: Store, value: float) -> None:
    save({"w": torch.full((4,), value)}, store=store, no_dist=True)


def save_dcp(store: Store, value: float) -> None:
    save({"w": torch.full((4,), value)}, storage_writer=DCPWriter(store), no_dist=True)


def loaded(store: Store) -> float:
    load(state := {"w": torch.zeros(4)}, store=store, no_dist=True)
    (value,) = set(state["w"].tolist())
    return value


def save_latest(store: Store, value: float) -> None:
    name_as_latest(Place(store), f"global_step{value}")


def latest(store: Store) -> float:
    return float(bytes(store.get("latest")[0]).decode().removeprefix("global_step"))


def save_stream(store: Store, value: float) -> None:
    file = store.stream("file.json")
    file.write(0, [memoryview(json.dumps({"value": value}).encode())])
    file.finish()


def streamed(store: Store) -> float:
    return float(json.loads(store.get("file.json")[0])["value"])


KINDS = {
    "manifest.terrazzo": (save_native, loaded),
    ".metadata": (save_dcp, loaded),
    "latest": (save_latest, latest),
    "file.json": (save_stream, streamed),
}


@pytest.mark.parametrize("root", KINDS)
@pytest.mark.parametrize("system", [Renames, Copies, Refuses, DoesNothing])
def test_killed_at_any_operation(system: type[Renames], root: str, tmp_path: Path) -> None:
    write, read = KINDS[root]
    at = 0
    while True:
        folder = tmp_path / str(at)
        write(FsspecStore(str(folder), prepared(folder, LocalFileSystem())), 1.0)
        dying = system()
        dying.at = at
        try:
            write(FsspecStore(str(folder), dying), 2.0)
            killed = False
        except Killed:
            killed = True
        store = FsspecStore(str(folder), system())
        try:
            assert read(store) in ([1.0, 2.0] if killed else [2.0])
        except (CheckpointError, ValueError):
            assert system is not Renames, f"operation {at}"
            (whole,) = folder.glob(f"{root}.*.tmp")
            shutil.copy(whole, folder / root)  # by hand
            assert read(store) == 2.0
        if not killed:
            break
        for left in folder.glob("*.tmp"):
            os.utime(left, (1, 1))  # else the next save would wait for it
        write(store, 3.0)
        assert read(store) == 3.0
        at += 1
    assert at > 2 or root in ("latest", "file.json")
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))


class InTurns(Renames):
    """Two processes carry out operations in an order that the test decides."""

    cachable = False

    def _alive(self) -> bool:
        wait_for_turn()
        return True

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        wait_for_turn()
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        wait_for_turn()
        return super().cat_file(path, *arguments, **options)


def test_of_two_that_replace_the_root_one_succeeds_in_every_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    outcomes, chance = set(), random.Random(0)
    for number, turns in enumerate(product(range(12), range(12), (1, 4, 7))):
        folder = tmp_path / str(number)
        store = FsspecStore(str(folder), prepared(folder, InTurns()))
        version = store.put("root", b"old")

        def put(data: bytes, store: FsspecStore = store, version: Version = version) -> Any:
            return lambda _: store.put("root", data, only_if=version)

        pair = played(store, [put(b"first"), put(b"second")], turns)
        while not all(each.ended for each in pair):
            for each in pair:
                each.run(chance.randint(1, 7))  # as they wait for times that differ by chance
        won = [not isinstance(each.result, ConflictError) for each in pair]
        assert won.count(True) < 2, turns
        there = bytes(store.get("root")[0])
        assert there == (b"first" if won[0] else b"second" if won[1] else b"old"), turns
        assert [entry.key for entry in store.list()] == ["root"], turns
        outcomes.add(tuple(won))
    assert outcomes >= {(True, False), (False, True)}


def test_what_a_killed_process_left_is_waited_for_only_as_long_as_it_may_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(str(tmp_path), LocalFileSystem())
    left = tmp_path / "root.0123456789ab.tmp"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    version = store.put("root", b"1", only_if=ABSENT)  # at once
    left.touch()
    monkeypatch.setattr(fsspec_store, "_PATIENCE", 0.2)
    assert store.put("root", b"2", only_if=version) == store.present("root")
    monkeypatch.setattr(FsspecStore, "_check_version", lambda *arguments: time.sleep(0.2))
    with pytest.raises(ConflictError, match="may count this one as dead"):
        store.put("root", b"3", only_if=store.present("root"))
    assert store.get("root")[0] == b"2"


def prepared(folder: Path, fs: LocalFileSystem) -> LocalFileSystem:
    folder.mkdir()
    return fs


@pytest.mark.parametrize("system", [Refuses, DoesNothing])
def test_a_large_file_that_cannot_be_replaced(system: type[Renames], tmp_path: Path) -> None:
    store = FsspecStore(str(tmp_path), system())
    piece = memoryview(bytes(70 << 20))
    for again in (False, True):
        file = store.stream("large")
        file.write(0, [piece])
        if again:
            with pytest.raises(FileExistsError):
                file.finish()
        else:
            file.finish()
    assert store.stat("large").size == len(piece)
