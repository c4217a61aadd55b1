"""Local ranks of `terrazzo.testing` that train in the background, and that can be stopped at any moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terrazzo.errors import DemoError
from terrazzo.testing import Outcome
from terrazzo.testing.pool import World
from terrazzo.testing.process import Request

_FREEZE_LIMIT = 5.0  # seconds


class TrainingRanks:
    """Ranks that run `work(*arguments)`."""

    def __init__(self, title: str, count: int, work: Callable[..., None], *arguments: Any) -> None:
        self.title = title
        request = Request.of(work, arguments)
        self._world = World(count, request)
        self._world.begin(request)
        self._outcomes: list[Outcome] = []

    @property
    def have_ended(self) -> bool:
        """Whether all ranks have returned or died."""
        return bool(self._outcomes) or self._world.has_ended

    def join(self, limit: float) -> None:
        """Wait for all ranks to return, and raise if one fails."""
        self._outcomes = self._outcomes or self._world.end(limit)
        failed = [outcome for outcome in self._outcomes if not outcome.ok]
        if failed:
            raise DemoError(
                "\n".join([f"{self.title}: {len(failed)} of {len(self._outcomes)} ranks failed", *map(str, failed)])
            )

    def freeze(self) -> None:
        """Stop the processes (SIGSTOP), so that their files do not change while they are looked at."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + _FREEZE_LIMIT
        while not all(_is_stopped(pid) for pid in self._world.pids):
            if time.monotonic() > until:
                raise DemoError(f"{self.title}: the processes do not react to SIGSTOP")
            time.sleep(0.0005)

    def thaw(self) -> None:
        """Let the processes continue."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all processes at once (SIGKILL)."""
        self._signal(signal.SIGKILL)
        self._world.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._world.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended
    return all(state in "TtZX" for state in states)
