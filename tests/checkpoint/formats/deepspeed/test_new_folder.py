"""Of two saves to one tag one commits, and its checkpoint has its own files only."""

from __future__ import annotations

import os
from itertools import count, takewhile
from pathlib import Path

import pytest

from checkpoint.interleave import Pause, PausingStore, interleaved
from terrazzo.checkpoint.formats.deepspeed.files import UNFINISHED
from terrazzo.checkpoint.formats.deepspeed.new_folder import NewFolder
from terrazzo.checkpoint.stores import MemoryStore, Place
from terrazzo.errors import CheckpointError, CheckpointExistsError, ConflictError

FILE = "mp_rank_00_model_states.pt"
A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def write(folder: NewFolder, text: bytes) -> None:
    folder.check()
    folder.store.put(FILE, text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_saves_to_one_tag_in_a_folder(tmp_path: Path):
    first, second = NewFolder(Place(tmp_path) / "tag", A), NewFolder(Place(tmp_path) / "tag", B)
    for folder in (first, second):
        folder.prepare()
    write(first, b"a")
    write(second, b"b")
    second.commit([FILE])
    write(first, b"aa")
    with pytest.raises(CheckpointExistsError, match="cannot replace another"):
        first.commit([FILE])
    first.discard()
    assert names(tmp_path) == ["tag"] and (tmp_path / "tag" / FILE).read_bytes() == b"b"


def test_a_killed_save_leaves_nothing(tmp_path: Path):
    dead, alive, other = (NewFolder(Place(tmp_path) / tag, save) for tag, save in [("t", A), ("t", B), ("t.t", A)])
    for folder in (dead, alive, other):
        folder.prepare()
        write(folder, b"x")
    dead._lease = None  # which closes its lock, as the end of its process does
    last = NewFolder(Place(tmp_path) / "t", "c" * 12)
    last.prepare()
    assert names(tmp_path) == sorted(
        [
            f".t.{B}.lease",
            f".t.{B}.tmp",
            ".t.cccccccccccc.lease",
            ".t.cccccccccccc.tmp",
            f".t.t.{A}.lease",
            f".t.t.{A}.tmp",
        ]
    )
    with pytest.raises(CheckpointError, match="the folder must be the same for all ranks"):
        dead.check()
    for folder in (alive, last, other):
        folder.discard()
    assert os.listdir(tmp_path) == []


def test_two_saves_to_one_tag_in_a_store(monkeypatch: pytest.MonkeyPatch):
    place = Place(MemoryStore()) / "tag"
    first, second = NewFolder(place, A), NewFolder(place, B)
    first.prepare()
    write(first, b"a")
    with pytest.raises(CheckpointExistsError, match="is being written, or its save was killed"):
        second.prepare()
    second.discard()
    monkeypatch.setattr(MemoryStore, "lease_seconds", -1.0)  # the first one has written nothing for an hour
    second.prepare()
    with pytest.raises(ConflictError, match="another save, which has taken this one for dead"):
        write(first, b"aa")
    write(second, b"b")
    with pytest.raises(ConflictError):
        first.commit([FILE])
    first.discard()
    assert second.is_taken() is False
    second.commit([FILE])
    assert second.is_taken() and bytes(place.store.get(FILE)[0]) == b"b" and not place.store.exists(UNFINISHED)
    second.discard()
    assert second.is_taken()


def test_of_two_that_begin_in_a_store_one_does():
    def try_at(at: int) -> bool:
        store = MemoryStore()

        def begin(save_id: str, pause: Pause) -> NewFolder:
            folder = NewFolder(Place(PausingStore(store, pause)) / "tag", save_id)
            folder.prepare()
            write(folder, save_id.encode())
            folder.commit([FILE])
            return folder

        ends = interleaved(at, lambda pause: begin("c" * 12, pause), lambda: begin(B, Pause()))
        done = [end for end in ends[:2] if isinstance(end, NewFolder)]
        assert all(isinstance(end, NewFolder | CheckpointExistsError | ConflictError) for end in ends[:2]), (at, ends)
        assert len(done) == 1, (at, ends)
        assert bytes(store.beneath("tag").get(FILE)[0]).decode() == done[0]._save_id, at
        return ends[2]

    assert len(list(takewhile(try_at, count()))) > 5
