"""The spare process of this host (`forking`), from the side of `terrazzo train`.

It is started when ranks have made their first step: what they have imported by then, and later, it imports. Ranks that
are started again are forked from it, which takes milliseconds. As long as it is not ready, or if it cannot be used,
they are started as the first ones.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from terrazzo.launch import forking

_MOST: Final = 8  # modules to be left out, after which there is no spare process
_PATIENCE: Final = 20.0  # seconds for it to answer
_NEEDED: Final = ("torch", "terrazzo")
# What ranks need and have not imported when they tell what they have.
_FIRST: Final = ("torch", "terrazzo._torch.launching")
_ADOPT: Final = 36  # PR_SET_CHILD_SUBREAPER


class Forked:
    """A process that the spare one has forked, whose parent this process is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None if it runs."""
        with self._lock:
            return self._poll()

    def _poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the status."""
        with self._lock:  # another thread polls, and what it has seen the end of is gone
            end = os.pidfd_open(self.pid) if self._poll() is None else None
        if end is not None:
            try:
                select.select([end], [], [], timeout)
            finally:
                os.close(end)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status


class Spare:
    """The spare process; `say` gets a line if there is none."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._lock = threading.Lock()  # the agent's thread starts ranks, another one looks
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._modules: dict[str, None] = {}
        self._path: list[str] = []
        self._own: list[str] = []
        self._without: dict[str, str] = {}
        self._unsent: list[str] = []
        self._owed = False  # an answer
        self._over = False

    def learn(self, modules: Iterable[str], path: Sequence[str], own: Iterable[str]) -> None:
        """Import these as well; `own` are the variables that differ from rank to rank."""
        with self._lock:
            new = [name for name in (*_FIRST, *modules) if name not in self._modules]
            self._modules.update(dict.fromkeys(new))
            self._unsent += new
            self._path, self._own = list(path), list(own)

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all."""
        with self._lock:
            return self._socket is not None and not self._owed and not self._unsent

    def look(self) -> None:
        """See what it has answered, and have it import what it has not been told of."""
        with self._lock:
            self._take(0.0)
            if self._unsent and not self._owed and not self._over:
                self._import()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], streams: tuple[int, int, int]
    ) -> Forked | None:
        """A rank's process, which runs `python -u ARGUMENTS`; None if the spare process is not ready."""
        with self._lock:
            if self._socket is None or not self._take(1.0):
                return None
            libc = ctypes.CDLL(None)
            libc.prctl(_ADOPT, 1, 0, 0, 0)
            try:
                request = {"arguments": list(arguments), "environment": dict(environment)}
                forking.send(self._socket, request, streams)
                answer = self._answer()
            except (OSError, EOFError) as error:
                self._give_up(f"it ended while it started a rank ({error or type(error).__name__})")
                return None
            finally:
                libc.prctl(_ADOPT, 0, 0, 0, 0)
            return Forked(answer["pid"])

    def close(self) -> None:
        """End it; the ranks stay."""
        with self._lock:
            self._close()

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(Path(forking.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,  # what modules print, the ranks have printed
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which tells the ranks
            )
        ours.settimeout(_PATIENCE)
        return ours

    def _import(self) -> None:
        self._socket = self._socket or self._open()
        request = {"modules": self._unsent, "path": self._path, "own": self._own, "without": list(self._without)}
        try:
            forking.send(self._socket, request)
        except OSError as error:
            self._give_up(f"it ended ({error})")
        self._owed, self._unsent = True, []

    def _answer(self) -> Any:
        assert self._socket is not None
        return forking.receive(self._socket)[0]

    def _take(self, patience: float) -> bool:
        """Take the answers that are there, or come soon; returns whether it has imported all."""
        if self._socket is not None and self._owed:
            if not select.select([self._socket], [], [], patience)[0]:
                return False
            try:
                answer = self._answer()
            except (OSError, EOFError):
                assert self._process is not None
                self._close()
                self._give_up(f"it ended with status {self._process.returncode}")
                return False
            self._owed = False
            if "trouble" in answer:
                self._leave_out(answer["trouble"], answer["why"])
                return False
        return self._socket is not None

    def _leave_out(self, module: str, why: str) -> None:
        """Begin again without a module."""
        self._without[module] = why
        self._close()
        if module in _NEEDED or len(self._without) > _MOST:
            self._give_up("; ".join(f"{name}: {said}" for name, said in self._without.items()))
        else:
            self._unsent = list(self._modules)

    def _give_up(self, why: str) -> None:
        self._close()
        self._over = True
        self._say(f"there is no spare process, so ranks that are started again import everything: {why}")

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._owed = None, False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
