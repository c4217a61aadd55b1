"""What is made of the ends of processes and of what ranks say."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from terrazzo.engine import marks as marks_module
from terrazzo.engine.marks import BEATS, FILE, Beat, Mark, mark, put, read_marks
from terrazzo.launch import recovery
from terrazzo.launch.live import read_live
from terrazzo.launch.recovery import HostRanks, Recovery, recovery_of

POINTS = ("made", "loading", "planned", "read", "stepped")
RANK = """
import sys
from terrazzo.engine.marks import mark
for point in sys.argv[1].split():
    mark(point)
sys.stdin.read()
"""


def marks(start: int = 1, **at: float) -> list[Mark]:
    return [Mark(what, when, 0, 1, start) for what, when in at.items()]


def test_what_is_not_all_known_is_not_told():
    said = marks(loading=5.0, planned=5.5, read=7.0, stepped=7.25)
    assert recovery_of([1.0], said) == Recovery(0.0, 4.0, 0.5, 1.5, 0.25)
    assert recovery_of([], said) is None and recovery_of([1.0], said[:3]) is None
    twice = [*said, *marks(loading=8.0, planned=9.0, read=9.0)]  # a script that loads once more
    assert recovery_of([1.0], twice) == recovery_of([1.0], said)


def test_half_a_line_is_read_later(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(FILE, raising=False)
    mark("made")  # nobody listens
    monkeypatch.setenv(FILE, str(tmp_path / "marks"))
    monkeypatch.setenv("RANK", "3")
    for what in POINTS:
        mark(what)
    data = (tmp_path / "marks").read_bytes()
    assert [each.what for each in read_marks(data)] == list(POINTS) and read_marks(data)[0].rank == 3
    assert [each.what for each in read_marks(data[:-5])] == list(POINTS[:-1]) and read_marks(b"") == []


def test_the_last_step_is_told_when_the_program_ends(tmp_path: Path, monkeypatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setenv(FILE, str(tmp_path / "marks"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("atexit.register", ends.append)
    monkeypatch.setattr(marks_module, "EVERY", 1000.0)
    for step in (1, 2, 3):
        marks_module.beat(step, loss=torch.tensor(step / 2))
    del marks_module._pulses[str(tmp_path / "marks")]
    file = tmp_path / f"marks-{BEATS}3"
    assert msgspec.json.decode(file.read_bytes(), type=Beat).step == 1
    (end,) = ends
    end()
    last = msgspec.json.decode(file.read_bytes(), type=Beat)
    assert (last.step, last.loss) == (3, 1.5)


@pytest.mark.long
def test_processes_that_end_are_seen(tmp_path: Path):
    """Two ranks of which one dies, and two that go on; once more, of which nothing is known about loading."""
    told: list[Recovery] = []
    heard = threading.Event()

    def tell(recovery: Recovery) -> None:
        told.append(recovery)
        heard.set()

    with HostRanks(tell) as watch:
        file = Path(os.environ[FILE])
        for number, points in enumerate(("made stepped", " ".join(POINTS), "made stepped")):
            ranks = [started(watch, [RANK, points], number, rank) for rank in range(2)]
            expected = (number and len(read_marks(file.read_bytes()))) + 2 * len(points.split())
            until(lambda least=expected: file.exists() and len(read_marks(file.read_bytes())) >= least)
            if number == 1:
                assert heard.wait(60)
            ranks[1].kill()
            ranks[1].wait()
            ranks[0].communicate()
    assert len(told) == 1 and told[0].start > 0 and FILE not in os.environ and not file.exists()


# ------------------------------------------------------------------ ranks that do not end, and ranks that hang

BEATING = """
import faulthandler, json, os, signal, sys, time
faulthandler.enable()
rank, step, ends = sys.argv[1:]
file = os.environ["TERRAZZO_MARKS"] + "-beat-" + rank
said = {"step": int(step), "at": time.time(), "rank": int(rank), "process": os.getpid(), "samples": 8 * int(step)}
said["start"] = [os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")]
signal.signal(signal.SIGTERM, lambda *_: None)
if ends == "never begins":
    time.sleep(1000)
open(file + ".new", "w").write(json.dumps(said))
os.rename(file + ".new", file)
def where_it_hangs():
    while sys.stdin.readline():
        pass
where_it_hangs()
sys.exit(int(ends) if ends.isdigit() else 0)
"""


def started(watch: HostRanks, arguments: list[str], number: int, rank: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(number), "RANK": str(rank), "MASTER_PORT": "1"}
    environment["TORCHELASTIC_MAX_RESTARTS"] = "1"
    command = [sys.executable, "-c", *arguments]
    own = functools.partial(
        subprocess.Popen, command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    process: Any = watch.start(own, command, environment, (0, 1, 2))
    return process


def until(done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not happen")


def test_ranks_that_do_not_end_after_a_failure_are_killed(monkeypatch):
    """Not so if the first one has saved, and left, since the job was told to end: others may still save."""
    monkeypatch.setattr(recovery, "PATIENCE", 0.2)
    for status, expected in (("1", -signal.SIGKILL), (str(128 + signal.SIGTERM), 0)):
        with HostRanks() as watch:
            failing, other = (started(watch, [BEATING, str(rank), "3", status if rank == 0 else "0"], 0, rank)
                              for rank in range(2))  # fmt: skip
            failing.communicate()
            assert failing.returncode == int(status)
            if expected:
                assert other.wait(60) == expected
            else:
                threading.Event().wait(1)
                other.communicate()
                assert other.returncode == 0


def test_ranks_that_still_run_at_the_end_are_killed() -> None:
    """As when torchrun is interrupted twice, and no longer waits for ranks that save."""
    with HostRanks() as watch:
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
        watch.start(lambda: rank, ["python"], {"RANK": "0"}, (0, 1, 2))
    try:
        assert rank.wait(60) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.communicate()


def test_ranks_that_make_no_step_are_ended_and_show_where_they_are(monkeypatch, tmp_path):
    """That is those that are behind; one that is stopped does not end by itself."""
    monkeypatch.setattr(recovery, "PATIENCE", 0.5)
    said: list[str] = []
    with HostRanks(say=said.append, stuck_after=2, folder=tmp_path / "run") as watch:
        steps = {0: "5", 1: "4", 2: "4"}
        ranks = [started(watch, [BEATING, str(rank), step, "0"], 0, rank) for rank, step in steps.items()]
        early = started(watch, [BEATING, "3", "0", "never begins"], 0, 3)
        until(lambda: len(list(Path(os.environ[FILE]).parent.glob("marks-beat-*[0-9]"))) == 3)
        os.kill(ranks[2].pid, signal.SIGSTOP)
        assert ranks[1].wait(60) == -signal.SIGABRT
        assert b"in where_it_hangs" in ranks[1].communicate()[1]
        assert [rank.wait(60) for rank in (*ranks[::2], early)] == [-signal.SIGKILL] * 3
    assert len(said) == 2 and all("made no step for 2 s (ranks.stuck_after), since step 4" in text for text in said)
    (host,) = read_live(tmp_path / "run")
    assert [(where.beat.rank, where.beat.step, where.beat.samples) for where in host.ranks] == [
        (0, 5, 40), (1, 4, 32), (2, 4, 32)
    ]  # fmt: skip


class Clocks:
    """Of a host: `time`'s may be set, and `monotonic` may not."""

    def __init__(self) -> None:
        self.at, self.ahead = 100.0, 0.0

    def monotonic(self) -> float:
        return self.at

    def time(self) -> float:
        return self.at + self.ahead


def test_when_a_step_was_made_counts_and_not_when_it_was_read(tmp_path: Path, monkeypatch) -> None:
    """Two ranks stop within a second and are found together, though one beat was read later; a new one is read before
    anybody is ended; and setting the host's clock ends nobody."""
    clocks, ended = Clocks(), list[int]()
    monkeypatch.setattr(recovery, "time", clocks)
    monkeypatch.setattr(recovery, "_send", lambda send, process, number: ended.append(process))
    monkeypatch.setattr(recovery, "_is_there", lambda process: True)

    def begun() -> HostRanks:
        ended.clear()
        watch = HostRanks(stuck_after=10)
        watch._file = tmp_path / "marks"
        watch._now.start = ("0", "1")
        return watch

    def beat(rank: int, step: int) -> None:
        said = Beat(step, clocks.time(), rank, process=rank, start=("0", "1"))
        put(f"{tmp_path}/marks-{BEATS}{rank}", msgspec.json.encode(said))

    def look(watch: HostRanks, until: float) -> None:
        while clocks.at < until and not ended:
            clocks.at += 0.25
            watch._look()

    watch = begun()
    beat(1, 4)
    look(watch, 100.25)  # reads the beat of rank 1 alone, and the others' half a second later
    beat(2, 4)
    beat(0, 5)
    look(watch, 120)
    assert clocks.at == pytest.approx(110.25) and ended == [1, 2]

    clocks.at = 100.0
    watch = begun()
    for rank in range(3):
        beat(rank, 4)
    look(watch, 109.75)
    for rank in (1, 2):
        beat(rank, 5)
    look(watch, 120)
    assert clocks.at == 110.25 and ended == [0]

    for set_by in (3600.0, -3600.0):
        clocks.at, clocks.ahead = 100.0, 0.0
        watch = begun()
        for step in range(20):
            for rank in range(3):
                beat(rank, step)
            clocks.ahead = set_by * (step % 2)  # between writing and reading
            look(watch, clocks.at + 1)
            clocks.ahead = set_by * ((step + 1) % 2)
        assert not ended
