"""A file system that fails when told to: the functions of `os` that a `LocalStore` uses, with a fault at the n-th."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

from terrazzo.checkpoint import FileSystemWriter
from terrazzo.checkpoint.stores import LocalStore, Store

OPERATIONS = "mkdir listdir open pwritev preadv fsync replace unlink rmdir close fstat flock".split()


class FaultySystem:
    """`os`, but operation number `at` suffers the fault: `kill`, or the name of an errno.  `short`, `slow`: all do."""

    def __init__(self, at: int, fault: str) -> None:
        self.at = at
        self.fault = fault
        self.count = 0
        self.happened: str | None = None

    def __getattr__(self, name: str) -> Any:
        function = fcntl.flock if name == "flock" else getattr(os, name)
        if name not in OPERATIONS:
            return function

        def guarded(*arguments: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if self.fault == "slow":
                time.sleep(0.01)
            if self.fault == "short" and name == "pwritev":
                fd, buffers, offset = arguments
                return os.pwritev(fd, [buffers[0][: max(len(buffers[0]) // 2, 1)]], offset)
            if self.fault == "short" and name == "preadv":
                fd, buffers, offset = arguments
                return os.preadv(fd, [buffers[0][: max(len(buffers[0]) // 2, 1)]], offset)
            if number == self.at:
                self.happened = name
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "close":
                    os.close(*arguments)  # also a failing close releases the descriptor
                if name == "pwritev" and self.fault == "ENOSPC":
                    fd, buffers, offset = arguments
                    os.pwritev(fd, [buffers[0][:10]], offset)  # a full disk takes the first bytes
                code = getattr(errno, self.fault)
                raise OSError(code, os.strerror(code))
            return function(*arguments)

        return guarded


class FaultyWriter(FileSystemWriter):
    """A `FileSystemWriter` on a `FaultySystem`."""

    def __init__(self, path: str | Path, system: FaultySystem) -> None:
        self.system = system
        super().__init__(path)

    def _open_store(self, path: Any) -> Store:
        return LocalStore(path, self.system)
