"""The times at which a rank reached points of its start, to measure how long recovery from a fault takes.

`terrazzo train` names a file in the environment, to which ranks append; without it nothing is written.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

FILE: Final = "TERRAZZO_MARKS"


class Mark(msgspec.Struct, frozen=True):
    """A rank has reached a point.

    Attributes:
        what: `made` (the engine), `loading`, `planned`, `read` or `stepped` (the first step after it).
        at: seconds since 1970.
        rank: its number among all ranks.
        process: its process id, on its host.
        start: how many times the ranks had been restarted.
    """

    what: str
    at: float
    rank: int
    process: int
    start: int


def mark(what: str) -> None:
    """Write that this rank has reached the point."""
    file = os.environ.get(FILE)
    if not file:
        return
    rank, start = (int(os.environ.get(name) or 0) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    line = msgspec.json.encode(Mark(what, time.time(), rank, os.getpid(), start)) + b"\n"
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # the measuring process has ended
        return
    try:
        os.write(fd, line)  # in one call, so that lines of several ranks do not mix
    finally:
        os.close(fd)


def read_marks(data: bytes) -> list[Mark]:
    """The marks in the contents of the file, up to its last complete line."""
    return [msgspec.json.decode(line, type=Mark) for line in data[: data.rfind(b"\n") + 1].splitlines()]
