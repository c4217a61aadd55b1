"""What is made of the ends of processes and of what ranks say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from terrazzo.engine.marks import FILE, Mark, mark, read_marks
from terrazzo.launch.recovery import Recovery, Watch, recovery_of

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

    def start(number: int, points: str) -> list[subprocess.Popen]:
        environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(number)}
        return [
            subprocess.Popen(
                [sys.executable, "-c", RANK, points], env=environment | {"RANK": str(rank)}, stdin=subprocess.PIPE
            )
            for rank in range(2)
        ]

    with Watch(tell):
        file = Path(os.environ[FILE])
        for number, points in enumerate(("made stepped", " ".join(POINTS), "made stepped")):
            ranks = start(number, points)
            expected = (number and len(read_marks(file.read_bytes()))) + 2 * len(points.split())
            for _ in range(6000):
                if file.exists() and len(read_marks(file.read_bytes())) >= expected:
                    break
                threading.Event().wait(0.01)
            if number == 1:
                assert heard.wait(60)
            ranks[1].kill()
            ranks[1].wait()
            ranks[0].communicate()
    assert len(told) == 1 and told[0].start > 0 and FILE not in os.environ and not file.exists()
