"""Threads of saves: results in order, errors when all is over, and also while the interpreter ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from terrazzo.checkpoint import FileSystemWriter, async_save, load
from terrazzo.checkpoint.stores import Capabilities, LocalStore
from terrazzo.checkpoint.stores.threads import results_of


def test_results_come_in_the_order_of_the_calls_and_threads_run_at_once() -> None:
    together = threading.Barrier(3, timeout=30)

    def call(number: int) -> int:
        together.wait()
        return number

    assert results_of([lambda number=number: call(number) for number in range(6)], 3, "test") == list(range(6))
    assert results_of([], 3, "test") == []


def test_an_error_is_raised_when_nothing_runs_any_more_and_nothing_new_begins() -> None:
    began, ended = [], []
    both = threading.Barrier(2, timeout=30)

    def fails() -> None:
        began.append("fails")
        both.wait()
        raise OSError("no room")

    def slow() -> None:
        began.append("slow")
        both.wait()
        time.sleep(0.1)
        ended.append("slow")

    with pytest.raises(OSError, match="no room"):
        results_of([fails, slow, lambda: began.append("third")], 2, "test")
    assert sorted(began) == ["fails", "slow"] and ended == ["slow"]


class SmallFiles(LocalStore):
    """A folder that is written as an object store is: several small files at once."""

    caps = Capabilities(in_place=False, file_bytes=1 << 16)


@pytest.mark.parametrize("several", ["threads", "files"])
def test_a_process_that_ends_completes_its_save(tmp_path: Path, several: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then executors take no more work: only threads can be started."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    state = {f"w{number}": torch.full((100, 100), float(number)) for number in range(8)}
    if several == "threads":
        future = async_save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=3), no_dist=True)
    else:
        future = async_save(state, store=SmallFiles(tmp_path), no_dist=True)
    future.result(60)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())
