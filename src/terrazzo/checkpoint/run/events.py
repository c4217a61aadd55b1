"""Structured log events of checkpoint operations: duration, bytes and details.

Every event is an INFO record (ERROR when the operation failed) of the logger `terrazzo.checkpoint`, with the
`Event` as its attribute `event`:

>>> import logging
>>> class Collect(logging.Handler):
...     def emit(self, record):
...         print(record.event.what, record.event.checkpoint_id)
>>> handler = Collect(); LOGGER.addHandler(handler); LOGGER.setLevel(logging.INFO)
>>> with operation("save", "/checkpoints/7"):
...     pass
save /checkpoints/7
>>> LOGGER.removeHandler(handler)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from terrazzo._meant import plain_text

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")


@dataclass(slots=True)
class Event:
    """One operation, or one phase of it, on one rank."""

    what: str
    checkpoint_id: str | None = None
    rank: int = 0
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.what} rank={self.rank} checkpoint={self.checkpoint_id} seconds={self.seconds:.3f}"]
        if self.bytes:
            parts.append(f"bytes={self.bytes}")
        parts += [f"{key}={value}" for key, value in self.details.items()]
        if self.error is not None:
            parts.append(f"error={self.error}")
        return " ".join(parts)


@contextmanager
def operation(what: str, checkpoint_id: str | os.PathLike[str] | None, rank: int = 0) -> Iterator[Event]:
    """Measure the time of the context and log an event at its end; the caller may set `bytes` and `details`."""
    event = Event(what, None if checkpoint_id is None else os.fspath(checkpoint_id), rank)
    start = time.perf_counter()
    whole = _inside.set(True)
    first = False
    try:
        yield event
    except BaseException as error:
        event.error = plain_text(f"{type(error).__name__}: {error}")
        # An error is one line of the log, if the program has one: of the whole operation, and of the first rank that
        # failed. Without a log the line would stand above the exception, which says the same. In other threads, as of
        # a save in the background, perhaps nothing shows the exception.
        first = whole.old_value is not True and rank == min(getattr(error, "failures", None) or [rank])
        first = first and (LOGGER.hasHandlers() or threading.current_thread() is not threading.main_thread())
        raise
    finally:
        _inside.reset(whole)
        event.seconds = time.perf_counter() - start
        emit(event, logging.ERROR if first else logging.INFO)


_inside: ContextVar[bool] = ContextVar("inside an operation")


def emit(event: Event, level: int = logging.INFO) -> None:
    """Log an event."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", event, extra={"event": event})
