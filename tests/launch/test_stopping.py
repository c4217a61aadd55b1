"""Ranks that are told to end agree on a step, whoever was told and when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from ranks import run_fresh, run_ranks
from terrazzo.errors import LaunchError
from terrazzo.launch import Stopped, StopSignal


def check_agreement() -> tuple[list[int], int]:
    rank = dist.get_rank()
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not any(stop.agreed() for _ in range(3))
    assert signal.getsignal(signal.SIGTERM) is before

    ended = []
    for told, number in ((1, signal.SIGTERM), (0, signal.SIGUSR2)):
        stop = StopSignal()
        for step in range(1, 10):
            if rank == told and step == 4:
                os.kill(os.getpid(), number)
            # Collectives of the program's own lie between; ranks are at different places when the signal comes.
            dist.barrier()
            if stop.agreed():
                ended.append(step)
                break
        assert stop.agreed(), "and it stays so"
        with pytest.raises(Stopped) as stopped:
            stop.leave()
        assert stopped.value.code == 128 + number and stopped.value.signal is number
        assert signal.getsignal(number) is not stop._note
    return ended, signal.getsignal(signal.SIGTERM) is before


def test_one_rank_is_told_and_all_end_in_the_same_step():
    assert run_ranks(2, check_agreement) == [([5, 5], True)] * 2


def say_and_stay(connection: Any) -> None:
    connection.send("here")
    time.sleep(600)


def check_children() -> int | None:
    """A process that a rank forks ends when it is told to."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with StopSignal():
        child = context.Process(target=say_and_stay, args=(there,))
        child.start()
        assert here.recv() == "here"  # a signal that comes while Python forks is lost
        child.terminate()
        child.join()
    return child.exitcode


def test_forked_processes_end():
    (outcome,) = run_fresh(1, check_children)  # a rank of few threads, which a fork does not take along
    assert outcome.value == -signal.SIGTERM, outcome


def test_it_needs_ranks():
    with pytest.raises(LaunchError, match="init_process_group"):
        StopSignal()
