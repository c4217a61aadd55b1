"""What is removed is the checkpoint for which that was decided, whatever other jobs do meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count, product, takewhile
from pathlib import Path

import pytest
import torch

from checkpoint.interleave import Death, Pause, PausingStore, PausingSystem, interleaved
from checkpoint.interleavings import Ordered, played
from terrazzo.checkpoint import Checkpoint, CheckpointManager, load, save, verify
from terrazzo.checkpoint.manager.records import Catalog, remove
from terrazzo.checkpoint.native.commit import SAVER, is_held
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Place, Store, local
from terrazzo.checkpoint.stores.base import GONE
from terrazzo.errors import CheckpointNotFoundError, ConflictError

STEP = "global_step1"


def state(value: float) -> dict:
    return {"w": torch.full((6, 4), value), "v": torch.zeros(1)}


class OneOperation(PausingStore):
    """One that removes a file on condition by one operation, as a folder does."""

    def delete_if(self, key: str, version: object) -> None:
        self._pause.step()
        self._store.delete_if(key, version)

    def beneath(self, name: str) -> OneOperation:
        return OneOperation(self._store.beneath(name), self._pause, self.lease_seconds)


class World:
    """A run with steps 1 and 2, as two jobs see it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.memory = MemoryStore()
        shutil.rmtree(folder, ignore_errors=True)
        for step in (1, 2):
            save(state(float(step)), store=self.seen_by(Pause()).beneath(f"global_step{step}"))

    def seen_by(self, pause: Pause) -> Store:
        if self.kind == "folder":
            return LocalStore(self.folder, PausingSystem(pause))
        return {"bucket": PausingStore, "memory": OneOperation}[self.kind](self.memory, pause)

    @property
    def step(self) -> Store:
        return self.seen_by(Pause()).beneath(STEP)

    def judged(self, pause: Pause) -> Callable[[], str | None]:
        """A removal of step 1 that was decided on; the job then pauses."""
        catalog = Catalog(Place(self.seen_by(Pause())))
        (record,) = [record for record in catalog.read() if record.step == 1]
        return partial(remove, Catalog(Place(self.seen_by(pause))), 1, record)


def check(world: World, saved: object, removed: object, value: float, at: int) -> None:
    """A save that has succeeded is there; one that has not has left what was there, or nothing."""
    assert removed is None or removed in ("replaced", "being saved", "being read"), (at, removed)
    # The second: the folder was removed when the save had created it.
    failed = isinstance(saved, Exception)
    assert not failed or isinstance(saved, ConflictError) or "FileNotFoundError" in str(saved), (at, saved)
    if not failed:
        assert verify(world.step) == [] and Checkpoint(world.step)["w"][...].eq(value).all(), at
    elif removed is None:
        with pytest.raises(CheckpointNotFoundError):
            Checkpoint(world.step)
    else:
        assert verify(world.step) == []
    save(state(9.0), store=world.step)  # nothing is left that hinders another save
    assert verify(world.step) == []
    names = {entry.key.partition("-")[0] for entry in world.step.list()}
    assert names == {"data", "manifest.terrazzo"}, (at, names)


@pytest.mark.parametrize("kind", ["bucket", "memory", "folder"])
def test_a_late_removal(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """It is suspended before any of its operations, and another job saves the step again."""
    monkeypatch.setattr(local, "_LOCK_SECONDS", 0.2)
    outcomes = []

    def try_at(at: int) -> bool:
        world = World(kind, tmp_path / "run")
        removed, saved, paused = interleaved(
            at,
            lambda pause: world.judged(pause)(),
            lambda: save(state(2.0), store=world.step),
        )
        check(world, saved, removed, 2.0, at)
        outcomes.append((removed, isinstance(saved, Exception)))
        return paused

    assert len(list(takewhile(try_at, count()))) > 8
    assert {("replaced", False), (None, False)} <= set(outcomes)


@pytest.mark.parametrize("kind", ["bucket", "memory", "folder"])
def test_a_late_save(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """It is suspended before any of its operations, and the step is removed."""
    monkeypatch.setattr(local, "_LOCK_SECONDS", 0.2)
    outcomes = []

    def try_at(at: int) -> bool:
        world = World(kind, tmp_path / "run")
        saved, removed, paused = interleaved(
            at,
            lambda pause: save(state(2.0), store=world.seen_by(pause).beneath(STEP)),
            world.judged(Pause()),
        )
        check(world, saved, removed, 2.0, at)
        outcomes.append((removed, isinstance(saved, Exception)))
        return paused

    assert len(list(takewhile(try_at, count()))) > 8
    assert {(None, False), (None, True), ("being saved", False), ("replaced", False)} <= set(outcomes)


@pytest.mark.parametrize("kind", ["bucket", "memory"])
def test_a_removal_that_dies(tmp_path: Path, kind: str):
    """The step is there, whole, or absent: for readers, savers and lists; the next removal of that run cleans up."""
    found = []

    def try_at(at: int) -> bool:
        world = World(kind, tmp_path / "run")
        pause, died = Pause(at, dies=True), True
        try:
            world.judged(pause)()
            died = False
        except Death:
            pass
        for entry in world.step.list():  # which expires later
            if entry.key.startswith("remove-"):
                world.step.delete([entry.key])
        catalog = Catalog(Place(world.seen_by(Pause())))
        there = [record.step for record in catalog.read()]
        found.append((there, world.step.exists("manifest.terrazzo")))
        assert catalog.look()[1] == {}
        if 1 in there:
            assert verify(world.step) == []
        else:
            with pytest.raises(CheckpointNotFoundError):
                load(state(0.0), store=world.step)
        with CheckpointManager(world.seen_by(Pause()), keep=1) as manager:
            assert manager.steps() == there
            manager.restore("latest", state(0.0))
            manager.save(3, state(3.0))
        assert manager.steps() == [3] and list(world.seen_by(Pause()).folders()) == ["global_step3"]
        return died

    trials = len(list(takewhile(try_at, count())))
    assert trials > 8 and {str(there) for there, _ in found} == {"[1, 2]", "[2]"}
    assert (([2], True) in found) is (kind == "bucket")  # a manifest that says that it is gone


class Run(MemoryStore):
    """The store of a run with one step."""

    def __init__(self, step: Ordered) -> None:
        super().__init__()
        self._folders[STEP] = step


def test_every_order_of_a_removal_and_a_save_that_take_each_other_for_dead():
    """Each lease has expired: what remains is that a manifest is removed, and replaced, on condition."""

    def begin() -> tuple[Ordered, list[Callable[[Ordered], object]]]:
        store = Ordered()
        save(state(1.0), store=store)
        catalog = Catalog(Place(Run(store)))
        (record,) = catalog.read()
        return store, [
            lambda step: remove(Catalog(Place(Run(step))), 1, record),
            lambda step: bool(save(state(2.0), storage_writer=NativeWriter(step), no_dist=True)),
        ]

    store, works = begin()
    lengths = []
    for work in works:
        (alone,) = played(store, [work], [0])
        alone.run()
        lengths.append(alone.done)
    outcomes = set()
    for first in (0, 1):
        for turns in product(range(1, max(lengths) + 4), repeat=2):
            store, works = begin()
            ended = played(store, works[::-1] if first else works, turns)
            for each in ended:
                each.run()
            removed, saved = (each.result for each in (reversed(ended) if first else ended))
            assert saved is True or isinstance(saved, ConflictError), (first, turns, saved)
            assert removed in (None, "replaced"), (first, turns, removed)
            outcomes.add((removed, saved is True))
            there = None if not store.exists("manifest.terrazzo") else Checkpoint(store)["w"][...].mean().item()
            assert there == (2.0 if saved is True else None if removed is None else 1.0), (first, turns, ended, there)
            assert there is None or verify(store) == []
    assert {(None, True), (None, False), ("replaced", True)} <= outcomes


def test_a_save_does_not_replace_what_is_about_to_be_deleted():
    store = MemoryStore()
    save(state(1.0), store=store)
    store.put("manifest.terrazzo", GONE)
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint(store)
    with store.lease("remove-0123456789ab.lease"):
        with pytest.raises(ConflictError, match="is being removed by another job: save there later"):
            save(state(2.0), store=store)
        assert not is_held(store, SAVER)
    save(state(2.0), store=store)
    assert Checkpoint(store)["w"][...].eq(2).all()
