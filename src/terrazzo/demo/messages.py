"""Messages from the demo's first rank to the terminal: lines of JSON in a file, which stays if the rank is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The ranks begin to train."""

    step: int  # after which they continue
    parameters: int
    held: int  # of the parameters, by this rank


class Trained(msgspec.Struct, frozen=True, tag=True):
    """A step is done."""

    step: int
    loss: float


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The loss of a trained model on the text's first passages."""

    loss: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint is committed."""

    step: int


class Warned(msgspec.Struct, frozen=True, tag=True):
    """The library has logged a warning."""

    text: str


Message = Ready | Trained | Saved | Probed | Warned
Report = Callable[[Message], None]


def reporter(file: Path, rank: int) -> Report:
    """A function that writes messages to a file on the first rank, and does nothing on the others."""
    if rank != 0:
        return lambda message: None
    opened = file.open("ab", buffering=0)

    def report(message: Message) -> None:
        opened.write(msgspec.json.encode(message) + b"\n")

    return report


class Inbox:
    """Reads messages from the file, as they are written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0  # bytes
        self._decoder = msgspec.json.Decoder(Message)

    def new(self) -> list[Message]:
        """The messages since the last call. A line that is not complete yet is left for a later call."""
        if not self._file.exists() or self._file.stat().st_size == self._read:
            return []
        with self._file.open("rb") as opened:
            opened.seek(self._read)
            lines = opened.read().split(b"\n")[:-1]
        self._read += sum(len(line) + 1 for line in lines)
        return [self._decoder.decode(line) for line in lines]


class ForwardWarnings(logging.Handler):
    """Reports logged warnings, which would otherwise be written into the terminal's progress bars."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Warned(record.getMessage()))
