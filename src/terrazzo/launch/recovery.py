"""How long a run takes from a fault to its next step, and what the time is spent on.

    detect        from the end of the first process to the end of all processes on its host
    start         until the new processes, with libraries, connections and the model, start to load
    plan          until it is known what to read
    read          until the state is loaded
    first step    until the first step is done

The launcher sees processes end; the ranks of its host report when they reach the other points
(`terrazzo.engine.marks`).
"""

from __future__ import annotations

import os
import select
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

from terrazzo.engine.marks import FILE, Mark, read_marks

_LOOK: Final = 0.05  # seconds between two checks for new marks


@dataclass(frozen=True)
class Recovery:
    """The seconds of one recovery.

    >>> print(Recovery(0.1, 5.2, 0.1, 1.0, 0.6))
    7.0 s from the fault to the first step: detect 0.1, start 5.2, plan 0.1, read 1.0, first step 0.6
    """

    detect: float
    start: float
    plan: float
    read: float
    first_step: float

    def __str__(self) -> str:
        parts = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        said = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"{sum(parts.values()):.1f} s from the fault to the first step: {said}"


def recovery_of(ended: list[float], marks: list[Mark]) -> Recovery | None:
    """From the times at which the processes of the previous start ended, and the marks of the first rank of this one;
    None if some are missing.

    >>> points = {"loading": 5.0, "planned": 5.5, "read": 7.0, "stepped": 7.25}
    >>> said = [Mark(what, at, rank=0, process=7, start=1) for what, at in points.items()]
    >>> recovery_of([1.0, 2.0], said)
    Recovery(detect=1.0, start=3.0, plan=0.5, read=1.5, first_step=0.25)
    """
    at: dict[str, float] = {}
    for mark in marks:
        at.setdefault(mark.what, mark.at)
    if not ended or not {"loading", "planned", "read", "stepped"} <= at.keys():
        return None
    points = [min(ended), max(ended), at["loading"], at["planned"], at["read"], at["stepped"]]
    return Recovery(*(after - before for before, after in zip(points, points[1:], strict=False)))


class Watch:
    """Watches the ranks of this host, and calls `tell` each time that they have recovered from a fault."""

    def __init__(self, tell: Callable[[Recovery], object]) -> None:
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terrazzo-watch", daemon=True)
        self._marks: list[Mark] = []
        self._handles: dict[int, Mark] = {}  # of running processes
        self._ended: dict[int, list[float]] = {}  # for each start, the times at which its processes ended
        self._told: set[int] = {0}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-")
        self._file = Path(self._folder.name) / "marks"
        self._before = os.environ.get(FILE)
        os.environ[FILE] = str(self._file)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for handle in self._handles:
            os.close(handle)
        if self._before is None:
            os.environ.pop(FILE, None)
        else:
            os.environ[FILE] = self._before
        self._folder.cleanup()

    def _run(self) -> None:
        while not self._over.is_set():
            self._listen()
            poll = select.poll()
            for handle in self._handles:
                poll.register(handle, select.POLLIN)
            for handle, _ in poll.poll(_LOOK * 1000):
                self._ended.setdefault(self._handles.pop(handle).start, []).append(time.time())
                os.close(handle)
        self._listen()

    def _listen(self) -> None:
        try:
            marks = read_marks(self._file.read_bytes())
        except FileNotFoundError:
            return
        new, self._marks = marks[len(self._marks) :], marks
        for mark in new:
            if mark.what == "made":
                try:
                    self._handles[os.pidfd_open(mark.process)] = mark
                except ProcessLookupError:
                    self._ended.setdefault(mark.start, []).append(time.time())
            elif mark.what == "stepped" and mark.rank == 0 and mark.start not in self._told:
                self._told.add(mark.start)
                own = [each for each in marks if each.start == mark.start and each.rank == 0]
                recovery = recovery_of(self._ended.get(mark.start - 1, []), own)
                if recovery is not None:
                    self._tell(recovery)
