"""Two jobs that take each other for dead, in every order in which their operations can follow one another.

Leases have expired as soon as they are taken. Whatever the order: the checkpoint that is there in the end is whole, and
it is one whose save has not raised an error, or else the one that was there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from checkpoint.interleavings import Killed, Ordered, Participant, played
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.formats import DCPReader, DCPWriter
from terrazzo.checkpoint.native.commit import remove_leftovers
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointNotFoundError, ConflictError

OLD, FIRST, SECOND = 1.0, 2.0, 3.0
FORMATS: Any = {
    "native": (NativeWriter, NativeReader),
    "dcp": (DCPWriter, lambda store: DCPReader(Place(store))),
}


def saver(kind: str, value: float) -> Callable[[Any], Any]:
    def work(store: Ordered) -> float:
        save({"w": torch.full((3,), value)}, storage_writer=FORMATS[kind][0](store), no_dist=True)
        return value

    return work


def value_in(store: Ordered, kind: str) -> float | None:
    target = {"w": torch.zeros(3)}
    try:
        load(target, storage_reader=FORMATS[kind][1](store), no_dist=True)
    except CheckpointNotFoundError as error:
        assert "no committed checkpoint" in str(error) or "no torch DCP checkpoint" in str(error), error
        return None
    (value,) = set(target["w"].tolist())
    return value


def begin(kind: str, old: bool) -> Ordered:
    store = Ordered()
    if old:
        saver(kind, OLD)(store)
    return store


def check(store: Ordered, kind: str, old: bool, ended: list[Participant]) -> None:
    for each in ended:
        assert not isinstance(each.result, Exception) or isinstance(each.result, ConflictError), each.result
    saved = {each.result for each in ended if isinstance(each.result, float)}
    there = value_in(store, kind)
    # Of two that saved, the one that replaced the other.
    assert there in (saved or {OLD if old else None}), (there, saved)


def length(work: Callable[[Any], Any], kind: str, old: bool) -> int:
    (alone,) = played(begin(kind, old), [work], [0])
    alone.run()
    return alone.done


@pytest.mark.parametrize("turns", [3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("kind", ["native", "dcp"])
@pytest.mark.parametrize("other", ["saves", "sweeps"])
def test_every_order_of_two_that_take_each_other_for_dead(kind: str, old: bool, other: str, turns: int) -> None:
    if other == "sweeps" and kind == "dcp":
        pytest.skip("nothing else than a save removes these files")
    if turns > 3 and kind == "dcp":
        pytest.skip("as native, but slower")
    first, second = saver(kind, FIRST), saver(kind, SECOND) if other == "saves" else lambda store: sweep(store)
    most = 4 + max(length(first, kind, old), length(second, kind, old))
    for begins in ((first, second), (second, first))[: 1 if other == "saves" else 2]:
        for order in product(range(1, most), repeat=turns - 1):
            store = begin(kind, old)
            ended = played(store, begins, order)
            for each in ended if turns % 2 else reversed(ended):
                each.run()
            check(store, kind, old, ended)


def sweep(store: Ordered) -> None:
    remove_leftovers(store)


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_one_is_killed_at_any_moment_while_the_other_saves(kind: str) -> None:
    """Of two that take each other for dead, one is: then the old checkpoint is there, or one of theirs, whole."""
    first, second = saver(kind, FIRST), saver(kind, SECOND)
    most = 4 + length(first, kind, True)
    for stops, goes in product(range(1, most), repeat=2):
        store = begin(kind, True)
        lives, dies = played(store, [second, first], [goes, stops])
        had_ended = dies.ended
        dies.kill()
        lives.run()
        assert had_ended or isinstance(dies.result, Killed)
        there = value_in(store, kind)
        # Of two that committed, the one that replaced the other, which may be the one that was killed.
        assert there in ((FIRST, SECOND) if lives.result == SECOND else (OLD, FIRST)), (goes, stops, there)
