"""What became of a run's starts: when ranks were started, went on after a fault, and ended, in the run's folder.

The folder is that of the checkpoints. What happens before there is one is written when it is there; of a run whose
checkpoints are behind a URL nothing is written. Lines are only ever added, each in one write.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from platform import node
from typing import Final, Literal

import msgspec

from terrazzo.checkpoint.stores import is_url
from terrazzo.launch.recovery import Recovery

NAME: Final = "history.jsonl"


class Happened(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        what: the command began, something was noted (a rank that made no step, say), ranks went on after a fault, or
            the command ended.
        at: seconds since 1970.
        seconds: of one that went on, what the time since the fault went into.
        status: of one that ended, the exit status.
        why: it ended, or what was noted.
        host: on which the command runs; several hosts of a run write into one file.
    """

    what: Literal["started", "noted", "went on", "ended"]
    at: float
    seconds: dict[str, float] = {}
    status: int = 0
    why: str = ""
    host: str = ""


class History:
    """Writes what happens to a run.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> history = History(folder)
    >>> history.add(Happened("started", 1.0))
    >>> history.add(Happened("ended", 2.0, status=1, why="rank 0 ended with status 1"))
    >>> [(each.what, each.at) for each in read_history(folder)]
    [('started', 1.0), ('ended', 2.0)]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = None if is_url(folder) else Path(folder)
        self._waiting: list[Happened] = []

    def add(self, happened: Happened) -> None:
        """Write a line, and those that have waited for the folder."""
        self._waiting.append(happened)
        if self._folder is None or not self._folder.is_dir():
            return
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in self._waiting)
        with suppress(OSError):  # a run does not end because its history cannot be written
            file = os.open(self._folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, lines)
            finally:
                os.close(file)
            self._waiting.clear()

    def started(self) -> None:
        """The command begins."""
        self.add(Happened("started", time.time(), host=node()))

    def went_on(self, recovery: Recovery) -> None:
        """Ranks go on after a fault."""
        self.add(Happened("went on", time.time(), asdict(recovery), host=node()))

    def noted(self, what: str) -> None:
        """Something happens that people may want to know."""
        self.add(Happened("noted", time.time(), why=what, host=node()))

    def ended(self, status: int, why: str) -> None:
        """The command ends."""
        self.add(Happened("ended", time.time(), status=status, why=why, host=node()))


def read_history(folder: str | os.PathLike[str]) -> list[Happened]:
    """The lines that there are, as far as they can be read."""
    try:
        data = (Path(folder) / NAME).read_bytes()
    except OSError:
        return []
    found = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        with suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=Happened))
    return found
