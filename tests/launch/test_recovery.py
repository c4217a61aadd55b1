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

import pytest

from terrazzo.engine.marks import FILE, Mark, mark, read_marks
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
