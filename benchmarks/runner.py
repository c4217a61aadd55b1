"""Runs cases: starts the ranks of each world on this machine, gives them their cases, and gathers what they measured.

The cases of one module and world share their processes, one after the other. The ranks talk through gloo over loopback.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import cases
from benchmarks.cases import Case, Setting
from benchmarks.measure import measure
from benchmarks.report import Result, failure_of, result_of

START_LIMIT = 120.0  # seconds for ranks to import torch and find each other
CASE_LIMIT = 900.0  # seconds for one case; a run in which ranks wait for each other for ever has to end
CASE_SECONDS = 60.0  # after which a case takes no more samples than it needs

Samples = dict[str, list[float]]


class BenchmarkFailed(RuntimeError):
    """A case raised, or its ranks died or did not finish in time."""


def run(
    chosen: Iterable[Case],
    *,
    quick: bool = False,
    limit: float = CASE_LIMIT,
    seconds: float = CASE_SECONDS,
    began: Callable[[Case], None] = lambda case: None,
) -> Iterator[Result]:
    """Runs the cases, by module and world, and yields their results as they come. `began` is told of each that starts.

    A case that fails, or has not finished after `limit` seconds, has a result that says so, and the ones after it get
    new processes.  One that has taken `seconds` takes no more samples than it needs.
    """

    def together(case: Case) -> tuple[str, int]:
        return case.module, case.world

    for (module, world), group in groupby(sorted(chosen, key=together), key=together):
        remaining = list(group)
        while remaining:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                for result in _run_together(remaining, _Job(module, world, quick, folder, seconds), limit, began):
                    remaining = remaining[1:]
                    yield result


@dataclass(frozen=True)
class _Job:
    """What the ranks of one world need to know before they are given cases."""

    module: str
    world: int
    quick: bool
    folder: str
    seconds: float


def _run_together(chosen: Sequence[Case], job: _Job, limit: float, began: Callable[[Case], None]) -> Iterator[Result]:
    """Runs cases in the same processes, until the first that fails."""
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        for index in range(job.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(index, job, theirs), name=f"benchmark rank {index}")
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        for case in chosen:
            began(case)
            try:
                if case is chosen[0]:
                    _answers(ranks, START_LIMIT)
                for rank in ranks:
                    with suppress(BrokenPipeError):  # it is dead, as reading from it will show
                        rank.connection.send(case.name)
                yield result_of(case, _answers(ranks, limit)[0])
            except BenchmarkFailed as failure:
                yield failure_of(case, str(failure))
                return
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection


def _answers(ranks: Sequence[_Rank], limit: float) -> dict[int, Samples]:
    """What each rank has measured, once all are done."""
    deadline = time.monotonic() + limit
    waiting = {rank.connection: index for index, rank in enumerate(ranks)}
    answers: dict[int, Samples] = {}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchmarkFailed(f"ranks {sorted(waiting.values())} had not finished after {limit:g} seconds")
        for connection in [connection for connection in waiting if connection in ready]:
            index = waiting.pop(connection)
            try:
                answer = connection.recv()
            except (EOFError, ConnectionResetError):
                ranks[index].process.join()
                raise BenchmarkFailed(f"rank {index} died, exit status {ranks[index].process.exitcode}") from None
            if isinstance(answer, str):
                # A rank often fails because another one died.
                wait([ranks[other].process.sentinel for other in waiting.values()], 1.0)
                dead = [other for other in waiting.values() if ranks[other].process.exitcode]
                if dead:
                    raise BenchmarkFailed(f"rank {dead[0]} died, exit status {ranks[dead[0]].process.exitcode}")
                raise BenchmarkFailed(f"rank {index} failed\n{answer}")
            answers[index] = answer
    return answers


def _serve(rank: int, job: _Job, connection: Connection) -> None:
    """A rank: measures the cases that it is sent until the connection closes."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=timedelta(minutes=10))
    connection.send(_attempt(cases.load, [job.module]))
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        folder = Path(job.folder, name)
        folder.mkdir(exist_ok=True)
        connection.send(_attempt(measure, cases.get(name), Setting(rank, job.world, folder, job.quick), job.seconds))


def _attempt(call: Callable[..., Samples | None], *args: object) -> Samples | str:
    """What the call returned, or the traceback."""
    try:
        return call(*args) or {}
    except Exception:
        return traceback.format_exc()
