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

import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self

import msgspec

from terrazzo._meant import signal_name
from terrazzo._torch.launching import Process
from terrazzo.engine.marks import (
    BEATS,
    EVERY,
    FILE,
    IMPORTED,
    MISCONFIGURED,
    Beat,
    Imported,
    Mark,
    read_marks,
    start_of,
)
from terrazzo.errors import LaunchError
from terrazzo.launch.live import LiveFile
from terrazzo.launch.spare import Spare

PATIENCE: Final = 5.0
"""Seconds after a failure, in which the other ranks of the host may end by themselves; torchrun gives them 30."""

_LOOK: Final = 0.05  # seconds between two checks for processes that have ended, and for new marks
_HEAR: Final = 0.5  # seconds between two readings of beats
_COUNTS: Final = ("RESTART_COUNT", "MAX_RESTARTS")
_TOLD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)


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


class HostRanks:
    """The ranks of this host: starts them from a spare process, ends those that hang, and tells what happens.

    Args:
        tell: gets how long it took, each time that the ranks have recovered from a fault.
        say: gets a line about a rank that failed or hangs, and if there is no spare process.
        spare: whether ranks that are started again are forked from a spare process.
        stuck_after: the seconds after which a rank that makes no step is ended; None: never.
        folder: of the run, in which `terrazzo top` finds where the ranks are.
    """

    def __init__(
        self,
        tell: Callable[[Recovery], object] = lambda _: None,
        say: Callable[[str], object] = lambda _: None,
        *,
        spare: bool = False,
        stuck_after: float | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._tell, self._say = tell, say
        self._spare = Spare(say) if spare else None
        self._stuck_after = stuck_after
        self._live = LiveFile(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terrazzo-ranks", daemon=True)
        self._lock = threading.Lock()
        self._before, self._now = _Started(), _Started()
        self._own: list[str] = []  # the variables that differ from rank to rank
        self._marks = 0  # how many were read
        self.misconfigured = False  # a rank ended because of the config, as it would again
        self._imported = 0  # when the list of what ranks have imported was written

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-")
        self._file = Path(self._folder.name) / "marks"
        self._outer = os.environ.get(FILE)
        os.environ[FILE] = str(self._file)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for process in self._now.running.values():  # torchrun was interrupted while it waited for them
            _send(os.killpg, process.pid, signal.SIGKILL)
        if self._spare is not None:
            self._spare.close()
        if self._outer is None:
            os.environ.pop(FILE, None)
        else:
            os.environ[FILE] = self._outer
        self._folder.cleanup()

    def start(
        self,
        own: Callable[[], Process],
        command: Sequence[str],
        environment: dict[str, str],
        streams: tuple[int, int, int],
    ) -> Process:
        """Start a rank: `own` does it as torchrun would."""
        with self._lock:
            if self._now.start not in ((), start_of(environment)):
                self._listen()
                if self.misconfigured:
                    raise LaunchError("the config is wrong, so ranks are not started again")
        self._own = self._own or [name for name in environment if environment[name] != os.environ.get(name)]
        process: Process | None = None
        if self._spare is not None and list(command[:2]) == [sys.executable, "-u"]:
            process = self._spare.start(command[2:], environment, streams)
        if process is None:
            process = own()
        with self._lock:
            if self._now.start != (start := start_of(environment)):
                count, most = (int(environment.get(f"TORCHELASTIC_{name}") or 0) for name in _COUNTS)
                again = f"all ranks are started again (restart {count + 1} of {most})" if count < most else ""
                self._before, self._now = self._now, _Started(start, again)
            self._now.running[int(environment.get("RANK") or 0)] = process
        return process

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            self._look()
        self._look(all_beats=True)
        self._live.write(now=True)

    def _look(self, *, all_beats: bool = False) -> None:
        with self._lock:
            self._see_ends()
            self._listen()
            if all_beats or time.monotonic() >= self._now.heard + _HEAR:
                self._hear()
            self._end_what_hangs()
        if self._spare is not None:
            self._learn(self._spare)
        self._live.write()

    def _see_ends(self) -> None:
        now = self._now
        found = {rank: process.poll() for rank, process in now.running.items()}
        ended = {rank: status for rank, status in found.items() if status is not None}
        # Those that were killed first: an error of others that ended in the same moment may be the consequence.
        for rank, status in sorted(ended.items(), key=lambda each: (each[1] >= 0, each[0])):
            del now.running[rank]
            now.ended.append(time.time())
            if was_told(status):  # others may still be saving
                now.is_told = True
            elif status and now.limit is None:
                now.limit = time.monotonic() + PATIENCE
                self._listen()
                if now.again and not self.misconfigured:
                    self._say(f"{how_ended(rank, status)}; {now.again}")
        if now.limit is not None and not now.is_told and time.monotonic() > now.limit:
            now.limit = math.inf
            for process in now.running.values():
                _send(os.killpg, process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        try:
            marks = read_marks(self._file.read_bytes())
        except FileNotFoundError:
            return
        new, self._marks = marks[self._marks :], len(marks)
        for mark in new:
            self.misconfigured = self.misconfigured or mark.what == MISCONFIGURED
            if mark.what == "stepped" and mark.rank == 0 and not self._now.has_told and self._before.ended:
                self._now.has_told = True
                own = [each for each in marks if each.process == mark.process]
                recovery = recovery_of(self._before.ended, own)
                if recovery is not None:
                    self._tell(recovery)

    def _hear(self) -> None:
        """Read the ranks' beats."""
        now, before = time.monotonic(), self._now.heard
        self._now.heard = now
        for path in self._file.parent.glob(f"{self._file.name}-{BEATS}*[0-9]"):
            beat = msgspec.json.decode(path.read_bytes(), type=Beat)
            known = self._now.beats.get(beat.process)
            if beat.start == self._now.start and (known is None or known[1] != beat):
                # When it was written, wherever the host's clock has been set to: since the last reading.
                written = min(now, max(before, now - (time.time() - beat.at)))
                self._now.beats[beat.process] = written, beat
                self._live.add(beat)

    def _end_what_hangs(self) -> None:
        now = self._now
        if self._stuck_after is None or now.limit is not None or not self._silent(self._stuck_after):
            return
        self._hear()  # the last look at the beats may be older than the newest ones
        if not self._silent(self._stuck_after):
            return
        now.limit = time.monotonic() + PATIENCE
        # A rank writes its steps down at most once in EVERY seconds: those that stopped together may seem so far apart.
        stuck = self._silent(self._stuck_after - min(EVERY, self._stuck_after / 2))
        last = min(beat.step for beat in stuck)  # others may wait for those
        for beat in stuck:
            if beat.step == last:
                self._say(
                    f"rank {beat.rank} has made no step for {self._stuck_after:g} s (ranks.stuck_after), since step "
                    f"{last}: it is ended, and shows where it is"
                )
                _send(os.kill, beat.process, signal.SIGABRT)

    def _silent(self, seconds: float) -> list[Beat]:
        """The last beats of the ranks that have written none for so long."""
        limit = time.monotonic() - seconds
        # Where the interpreter was started by a script of its own, torchrun's process is another one.
        beats = self._now.beats.values()
        return [beat for written, beat in beats if written < limit and _is_there(beat.process)]

    def _learn(self, spare: Spare) -> None:
        file = Path(f"{self._file}-{IMPORTED}")
        with suppress(FileNotFoundError):
            if (written := file.stat().st_mtime_ns) != self._imported:
                said = msgspec.json.decode(file.read_bytes(), type=Imported)
                spare.learn(said.modules, said.path, self._own)
                self._imported = written
        spare.look()


@dataclass
class _Started:
    """The processes that were started together."""

    start: tuple[str | None, ...] = ()
    again: str = ""  # what happens if one fails; empty if that ends the run
    running: dict[int, Process] = field(default_factory=dict)  # by rank
    ended: list[float] = field(default_factory=list)  # when
    beats: dict[int, tuple[float, Beat]] = field(default_factory=dict)  # by process, with when they were written
    heard: float = 0.0  # when beats were last read
    limit: float | None = None  # when those that still run are killed, since one has failed
    is_told: bool = False  # to end
    has_told: bool = False  # how long recovery took


def was_told(status: int) -> bool:
    """Whether a rank with this status was told to end: by a signal, or with a status over 128 after it has saved."""
    return status > 128 or -status in _TOLD


def how_ended(rank: int, status: int) -> str:
    """How a rank failed.

    >>> how_ended(3, -9), how_ended(0, 1)
    ('rank 3 was killed by SIGKILL', 'rank 0 ended with status 1')
    """
    how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
    return f"rank {rank} {how}"


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _send(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        send(pid, number)
