"""Reports of ranks through a store: all get the same, in few requests, also if some never report or come later."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.comm import link, reports
from terrazzo.comm.link import Link
from terrazzo.comm.reports import exchange_reports
from terrazzo.comm.watch import Watch, _written_by_some
from terrazzo.comm.whereabouts import World
from terrazzo.errors import CommError


class Counted(dist.Store):
    """A store that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests, self._store, self._lock = 0, dist.HashStore(), threading.Lock()

    def _call(self, name: str, *args: Any) -> Any:
        with self._lock:
            self.requests += 1
            return getattr(self._store, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> Any:
        return self._call("get", key)

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._call("check", keys)

    def append(self, key: str, value: Any) -> None:
        self._call("append", key, value)

    def multi_get(self, keys: list[str]) -> Any:
        return self._call("multi_get", keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._call("compare_set", key, expected, desired)


def exchanged(store: dist.Store, size: int, indices: Any, seconds: float, **more: Any) -> list[dict[int, str]]:
    def report(index: int) -> dict[int, str]:
        return exchange_reports(store, "here", index, size, f"of {index}", seconds, **more)

    with ThreadPoolExecutor(len(indices)) as pool:
        return list(pool.map(report, indices))


def said_by(indices: Any) -> dict[int, str]:
    return {index: f"of {index}" for index in indices}


def test_all_get_all_in_few_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "_SOONEST", 0.2)
    store = Counted()
    assert exchanged(store, 64, range(64), 60) == [said_by(range(64))] * 64
    assert 64 * 3 < store.requests < 64 * 30  # each asking for each would be 4096


def test_ranks_whose_connections_broke_agree_on_the_reason_in_few_requests(monkeypatch: pytest.MonkeyPatch):
    """Also those that have never connected, of which others ask the store for the process."""
    monkeypatch.setattr(reports, "_SOONEST", 0.2)
    monkeypatch.setattr(link, "_REPORTS_SECONDS", 1.0)
    store = Counted()
    Link(store, 5, range(64), "here").abandon("the disk is full")

    def reason(index: int) -> str:
        with (
            pytest.raises(CommError) as raised,
            Link(store, index, range(64), "here")._explained("gather", timedelta(seconds=9)),
        ):
            raise RuntimeError("Connection closed by peer")
        return str(raised.value)

    silent = {5, *range(6, 64, 2)}
    with ThreadPoolExecutor(64) as pool:
        (text,) = set(pool.map(reason, set(range(64)) - silent))
    assert "failed: rank 5 gave up (the disk is full); the time limit is 9 s" in text
    assert store.requests < 64 * 30  # each asking for each would be 4096
    before = store.requests
    assert reason(6) == text, "a rank that comes later raises the same"
    assert store.requests < before + 10


def test_the_silent_are_left_out_and_the_late_get_those_before_them():
    store = dist.HashStore()
    assert exchanged(store, 5, [1, 2], 0.3) == [said_by([1, 2])] * 2
    assert exchanged(store, 5, [3, 4], 0.3) == [said_by([1, 2, 3, 4])] * 2
    assert exchanged(store, 5, [0], 0.3) == [said_by(range(5))]


def test_nobody_waits_for_those_who_cannot_report():
    gone = []

    def knows_enough(silent: Any) -> bool:
        gone.append(set(silent))
        return gone[-1] == {1}

    assert exchanged(dist.HashStore(), 3, [0, 2], 60, knows_enough=knows_enough) == [said_by([0, 2])] * 2


def test_an_editor_that_ends_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "_READING", 0.1)
    store = dist.HashStore()
    dist.PrefixStore("0", dist.PrefixStore("here", store)).set("editor", "7")
    assert exchanged(store, 2, [0, 1], 0.1) == [said_by([0, 1])] * 2


def check_failures_one_after_the_other() -> None:
    """Of each of two models."""
    here = dist.get_rank()
    first, second = (Watch(None, (0, 1), None, None, torch.device("cpu")) for _ in range(2))
    unit: Any = SimpleNamespace(name=f"layer{here}", code=1)
    for failure in range(3):
        for watch in (first, second):
            for _ in range(here + 1):
                watch.note(unit, "run")
        for watch in (first, second):
            text = str(watch.explain(CommError("lost")))
            for rank in (0, 1):
                assert f"rank {rank}: at event {(failure + 1) * (rank + 1)}, " in text, text

    watch = Watch(None, (0, 1), None, None, torch.device("cpu"))
    for failure in range(2):
        watch.note(unit, "run")
        dist.barrier()
        time.sleep(0.2 * failure * (1 - here))
        if failure or here == 0:  # rank 1 does not notice the first one, and the second one before rank 0
            text = str(watch.explain(CommError("lost")))
            assert f"rank 0: at event {failure + 1}, " in text, text
            assert ("rank 1: at event 2, " if failure else "rank 1: not in") in text, text
        dist.barrier()


def test_a_second_failure_shows_its_own_positions():
    run_ranks(2, check_failures_one_after_the_other)


def test_writes_that_differ_only_from_those_of_ranks_without_an_answer():
    text = _written_by_some([["layer"], None], (0, 1))
    assert text.startswith("some ranks wrote to the sharded parameters of one of ['layer'] after"), text
    assert _written_by_some([[], None], (0, 1)).startswith("some ranks wrote to the sharded parameters of a module")
    text = _written_by_some([["a", "b"], None, ["a"]], (0, 1, 2))
    assert text.startswith("rank 0 wrote to the sharded parameters of 'b' after"), text


def check_looking_for_lost_ranks() -> None:
    """Few requests, however many ranks have ended, and others have not said who they are."""
    world = World()
    dist.barrier()
    counted = Counted()
    for rank in range(2, 40):
        ending: Any = SimpleNamespace(is_there=lambda surely: True, rank=rank, _store=counted)
        World.end(ending, f"has ended {rank}")
    for rank in range(40, 80):
        counted.set(f"process/{rank}", "elsewhere 1 1" if rank < 79 else "")
    counted.requests = 0
    everyone = range(80)
    assert world.lost(everyone, counted) == {rank: f"has ended {rank}" for rank in range(2, 40)}
    first, counted.requests = counted.requests, 0
    assert world.lost([50, 60, 78], counted) == {}
    assert first < 120 and counted.requests < 5, (first, counted.requests)
    dist.barrier()


def test_looking_for_ranks_that_are_lost_takes_few_requests():
    run_ranks(2, check_looking_for_lost_ranks)
