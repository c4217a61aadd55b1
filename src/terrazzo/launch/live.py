"""Where the ranks of a run are now: a file for each host in the run's folder, which `terrazzo top` reads.

`terrazzo train` writes it every two seconds from the ranks' beats. Of a run whose checkpoints are behind a URL nothing
is written.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from platform import node
from typing import Final

import msgspec
from msgspec.structs import replace

from terrazzo.checkpoint.stores import is_url
from terrazzo.engine.marks import Beat, put

_NAME: Final = "live-{}.json"
_EVERY: Final = 2.0  # seconds between two writes
_SPAN: Final = 30.0  # seconds over which a rate is measured


class Pace(msgspec.Struct, frozen=True):
    """A rank's last step, and what it does in a second, as far as that is known."""

    beat: Beat
    steps: float | None = None
    samples: float | None = None
    tokens: float | None = None


class Host(msgspec.Struct, frozen=True):
    """The contents of a file.

    Attributes:
        host: its name.
        at: when it was written, in seconds since 1970.
        ranks: those of the host.
    """

    host: str
    at: float
    ranks: list[Pace]


def rates(beats: deque[Beat]) -> Pace:
    """A rank's last beat, and how far it came in a second since the first of these.

    >>> where = rates(deque([Beat(3, 10.0, 0, 7, samples=24), Beat(7, 12.0, 0, 7, samples=56)]))
    >>> where.steps, where.samples, where.tokens
    (2.0, 16.0, None)
    """
    first, last = beats[0], beats[-1]
    seconds = last.at - first.at

    def rate(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None or seconds <= 0 else (after - before) / seconds

    return Pace(last, rate(first.step, last.step), rate(first.samples, last.samples), rate(first.tokens, last.tokens))


class LiveFile:
    """Writes the file of this host."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None or is_url(folder) else Path(folder)
        self._beats: dict[int, deque[Beat]] = {}
        self._next = 0.0

    def add(self, beat: Beat) -> None:
        """A rank has made a step."""
        if any(known[-1].start != beat.start for known in self._beats.values()):
            self._beats.clear()  # ranks were started again, perhaps fewer
        before = self._beats.setdefault(beat.rank, deque())
        before.append(beat)
        while len(before) > 2 and before[0].at < beat.at - _SPAN:
            before.popleft()

    def write(self, *, now: bool = False) -> None:
        """Write it, if it is time."""
        if self._folder is None or not self._beats or (time.monotonic() < self._next and not now):
            return
        self._next = time.monotonic() + _EVERY
        ranks = [rates(self._beats[rank]) for rank in sorted(self._beats)]
        with suppress(OSError):  # a run does not end because it cannot be shown
            self._folder.mkdir(parents=True, exist_ok=True)
        put(str(self._folder / _NAME.format(node())), msgspec.json.encode(Host(node(), time.time(), ranks)))


def read_live(folder: str | os.PathLike[str]) -> list[Host]:
    """What the hosts of a run have written, as far as it can be read. All times are by the clock that dates the files,
    so that hosts whose clocks differ can be compared."""
    found = []
    for path in sorted(Path(folder).glob(_NAME.format("*"))):
        with suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            host = msgspec.json.decode(file.read(), type=Host)
            found.append(_moved(host, os.fstat(file.fileno()).st_mtime - host.at))
    return found


def _moved(host: Host, seconds: float) -> Host:
    ranks = [replace(pace, beat=replace(pace.beat, at=pace.beat.at + seconds)) for pace in host.ranks]
    return replace(host, at=host.at + seconds, ranks=ranks)
