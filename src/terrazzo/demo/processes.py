"""Local processes that train, and that can be stopped in their tracks.

They are forked from a server that has imported PyTorch, which takes longer than all else that they do at their start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terrazzo.errors import DemoError

# One thread per rank: they share the cores.  This has to be in the environment of the server before it imports PyTorch.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_FREEZE_LIMIT = 5.0  # seconds


class TrainingProcesses:
    """Processes that run `work(rank, *arguments, connection)`; the first has a connection to this one."""

    def __init__(self, title: str, count: int, work: Callable[..., None], *arguments: Any) -> None:
        for name, value in _THREADS.items():
            os.environ.setdefault(name, value)
        context = multiprocessing.get_context("forkserver")
        # torch._dynamo: every optimizer imports it.
        context.set_forkserver_preload(["terrazzo.demo.worker", "torch._dynamo"])
        self.title = title
        self.connection, theirs = context.Pipe(duplex=False)
        self._processes = [
            context.Process(target=_work, args=(work, rank, *arguments, theirs if rank == 0 else None), daemon=True)
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()
        theirs.close()  # so that the end of the first rank is the end of the messages

    @property
    def exit_codes(self) -> list[int | None]:
        """Of processes that have ended; minus the signal's number where a signal ended them."""
        return [process.exitcode for process in self._processes]

    def join(self, limit: float) -> None:
        """Wait for all to end well."""
        until = time.monotonic() + limit
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0))
        if any(code != 0 for code in self.exit_codes):
            raise DemoError(f"{self.title}: the processes ended with {self.exit_codes}; what they said is above")

    def freeze(self) -> None:
        """Stop them where they are (SIGSTOP): what they have done can be looked at without a race."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + _FREEZE_LIMIT
        while not all(_is_stopped(pid) for pid in self._pids()):
            if time.monotonic() > until:
                raise DemoError(f"{self.title}: the processes do not react to SIGSTOP")
            time.sleep(0.0005)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all of them at once, without a word to them (SIGKILL)."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None and process.is_alive()]


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are at rest."""
    try:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended
    return all(state in "TtZX" for state in states)


def _work(work: Callable[..., None], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the terminal's process ends the others
    work(*arguments)
