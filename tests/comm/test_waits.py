"""Ranks that wait for long say which ranks have not come, and where they are; and errors say which ranks have ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.checkpoint as checkpoint
from ranks import fresh_values, run_fresh
from terrazzo.comm import waits
from terrazzo.comm.axis import axis_over
from terrazzo.comm.collectives import all_reduce
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CommError, DivergedRanksError
from terrazzo.fsdp import fully_shard


class Heard(logging.Handler):
    """What this rank warns of; the other rank sees a file that says how many there were."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.texts = folder, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        (self.folder / str(len(self.texts))).touch()


def hurry(folder: str) -> Heard:
    waits._LONG, waits._LOOK = 0.3, 0.05
    heard = Heard(Path(folder))
    waits.LOGGER.addHandler(heard)
    return heard


def elsewhere(told: Path) -> None:
    while not told.exists():
        time.sleep(0.01)


def check_late_ranks(folder: str) -> None:
    """Rank 1 comes when rank 0 has warned; then all goes on as usual."""
    heard, here = hurry(folder), dist.get_rank()
    model, axis = train_two_steps()
    state = {"a": torch.arange(3)}
    calls: list[tuple[str, Callable[[], Any]]] = [
        (f"saving {folder}/a", lambda: checkpoint.save(state, checkpoint_id=f"{folder}/a")),
        ("all_gather on ", lambda: model(torch.ones(2, 4))),
        ("all_reduce on ranks 0,1, at", lambda: all_reduce(torch.ones(1), axis, "sum")),
        ("making a group of ranks 0-1", lambda: axis_over((1, 0), "cpu")),
        ("all_gather, at", lambda: ControlPlane.for_group().barrier()),
        ("barrier, at", waits.barrier),
    ]
    for number, (what, call) in enumerate(calls, 1):
        if here == 1:
            elsewhere(Path(folder) / str(number))
        call()
        if here == 0:
            text = heard.texts[-1]
            assert len(heard.texts) == number, heard.texts
            assert text.startswith(f"rank 0 has waited for 0.3 s in {what}"), text
            assert "rank 1 has not come." in text and "rank 1: runs" in text and "(time.sleep(0.01))" in text, text

    # A rank that is at work for the same has come.
    ControlPlane.for_group().run_together(lambda: time.sleep(1.0 * here), "something slow")
    assert len(heard.texts) == (0 if here else len(calls))

    # One that waits in something else says so.
    if here == 1:
        other = Thread(target=ControlPlane.for_group().barrier)
        other.start()
        elsewhere(Path(folder) / str(len(calls) + 1))
    all_reduce(torch.ones(1), axis, "sum")
    if here == 0:
        assert "; and waits in all_gather in another thread" in heard.texts[-1], heard.texts
        ControlPlane.for_group().barrier()
    else:
        other.join()


def test_waits_for_ranks_that_are_late(tmp_path: Path):
    fresh_values(2, check_late_ranks, str(tmp_path), timeout=60)


def train_two_steps() -> tuple[Any, Any]:
    model = fully_shard(nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    return model, axis_over((0, 1), "cpu")


def check_a_rank_that_ended(how: str) -> list[str]:
    model, axis = train_two_steps()
    if dist.get_rank() == 1:
        if how == "destroy":
            dist.destroy_process_group()
        if how == "raise":
            sys.last_value = ValueError("no data")  # as Python sets it for an error that nothing caught
        if how in ("end", "raise"):
            waits._state.end()  # as at the end of a process
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DivergedRanksError) as in_model:
        model(torch.ones(2, 4))
    with pytest.raises(CommError) as in_tensors:
        all_reduce(torch.ones(1), axis, "sum")
    return [str(in_model.value), str(in_tensors.value)]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("destroy", "rank 1: has left the process group, after 2 forwards, at "),
        ("end", "rank 1: has ended, after 2 forwards"),
        ("raise", "rank 1: has ended with ValueError: no data, after 2 forwards"),
        ("kill", "rank 1: died"),
    ],
)
def test_a_rank_that_has_ended_is_named_before_the_text_of_the_backend(how: str, told: str):
    outcome = run_fresh(2, check_a_rank_that_ended, how, awaited=[0])[0]
    assert outcome.ok, outcome
    for text in outcome.value:
        assert told in text and "usual cause" not in text, text
        assert text.index(told) < text.index("onnection"), text
