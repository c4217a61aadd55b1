"""When a rank reached which point of starting, for whoever measures how long it takes to go on after a fault.

`terrazzo train` names a file in the environment, to which ranks append; without it nothing is written.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

FILE: Final = "TERRAZZO_MARKS"


class Mark(msgspec.Struct, frozen=True):
    """A rank at one point.

    Attributes:
        what: `made` (the engine), `loading`, `planned`, `read` or `stepped` (the first step after it).
        at: seconds since 1970.
        rank: among all.
        process: its id, on its host.
        start: how often the ranks had been started again.
    """

    what: str
    at: float
    rank: int
    process: int
    start: int


def mark(what: str) -> None:
    """Say that this rank is there."""
    file = os.environ.get(FILE)
    if not file:
        return
    rank, start = (int(os.environ.get(name) or 0) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    line = msgspec.json.encode(Mark(what, time.time(), rank, os.getpid(), start)) + b"\n"
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # whoever measured has gone
        return
    try:
        os.write(fd, line)  # at once: lines of several ranks do not mix
    finally:
        os.close(fd)


def read_marks(data: bytes) -> list[Mark]:
    """The marks in what a file holds, as far as its last whole line."""
    return [msgspec.json.decode(line, type=Mark) for line in data[: data.rfind(b"\n") + 1].splitlines()]
