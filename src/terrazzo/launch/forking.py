"""The spare process of a host: it has imported what ranks import, and is forked for each rank that is started again.

    python -u forking.py FD        where FD is a socket to `terrazzo train`, whose requests it answers in order:

    {"modules": [...], "path": [...], "own": [...], "without": [...]}    import these
        -> {"imported": how many} or, if one of them cannot be shared by ranks, {"trouble": name, "why": ...}
    {"arguments": [...], "environment": {...}}, with stdin, stdout and stderr    start a rank
        -> {"pid": its process, whose parent is `terrazzo train`}

Only one thread runs when it is forked, no device has been used, and no module has read a variable that differs from
rank to rank: a module that does any of this when it is imported is trouble. The program's own modules are not imported
here, and its main module runs in ranks only.

This file is a script that imports only the standard library, so that what is imported, and how, is up to the requests.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import struct
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

_BLAS = ("numpy", "scipy.linalg")  # OpenBLAS has threads, which it ends before a fork and starts again when needed


def send(connection: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send a message, and these files."""
    data = json.dumps(message).encode()
    header = struct.pack("!I", len(data))
    if fds:
        socket.send_fds(connection, [header], fds)
    else:
        connection.sendall(header)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and its files; `EOFError` if the other side has ended."""
    header, fds, _, _ = socket.recv_fds(connection, 4, 3)
    (size,) = struct.unpack("!I", header + _exactly(connection, 4 - len(header)))
    return json.loads(_exactly(connection, size)), fds


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


class _Noting(type(os.environ)):  # type: ignore[misc]  # a class that has no name in os
    """An environment that notes which of its variables were read."""

    read: set[str] = set()

    def __getitem__(self, key: str) -> str:
        self.read.add(key)
        return super().__getitem__(key)


class ForkServer:
    """Imports, and forks."""

    def __init__(self) -> None:
        self._threads = 1
        self._path = sys.path[1:]  # the first is the folder of this script
        self._environment = type(os.environ)
        os.environ.__class__ = _Noting

    def serve(self, connection: socket.socket) -> tuple[Any, list[int]]:
        """Answer requests; returns in the process of a rank, with the request for it."""
        while True:
            try:
                request, fds = receive(connection)
            except (EOFError, ConnectionError):
                os._exit(0)
            if "modules" in request:
                send(connection, self._imported(**request))
                continue
            pid = self._forked()
            if pid is None:
                connection.close()
                return request, fds
            send(connection, {"pid": pid})
            for fd in fds:
                os.close(fd)

    def _forked(self) -> int | None:
        """Fork a process that this one is not the parent of, and return its number; None in it."""
        reads, writes = os.pipe()
        between = os.fork()
        if between == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()  # before it is known: torchrun sends signals to its group
            while os.getppid() == middle:
                time.sleep(0.0005)
            os.write(writes, struct.pack("!q", os.getpid()))
            os.close(reads)
            os.close(writes)
            return None
        os.close(writes)
        os.waitpid(between, 0)  # from now on its child is that of `terrazzo train`, which adopts orphans
        with open(reads, "rb") as pipe:
            return int(struct.unpack("!q", pipe.read())[0])

    def _imported(self, modules: list[str], path: list[str], own: list[str], without: list[str]) -> dict[str, Any]:
        sys.path[:] = path
        importlib.invalidate_caches()
        for name in own:  # so that who copies all variables, for a process that it starts, has not read these
            with suppress(KeyError):
                del os.environ[name]
        known = set(modules)
        for name in [*(name for name in _BLAS if name in known), *modules]:
            if any(f"{name}.".startswith(f"{other}.") for other in without):
                continue
            try:
                importlib.import_module(name)
            except BaseException:  # the ranks have it by other means, and will again
                continue
            if name in _BLAS:
                self._threads = _threads()
            if why := self._trouble(own):
                return {"trouble": name, "why": why}
        gc.collect()
        gc.freeze()  # ranks need not copy the memory of these objects to find garbage
        return {"imported": len(sys.modules)}

    def _trouble(self, own: list[str]) -> str | None:
        if _threads() > self._threads:
            return "it starts threads"
        if read := _Noting.read.intersection(own):
            return f"it reads the variable {min(read)}"
        return None

    def become(self, request: Any, fds: list[int]) -> list[str]:
        """Be the process of a rank; returns what Python is to run."""
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.__class__ = self._environment
        os.environ.clear()
        os.environ.update(request["environment"])
        if not importlib.import_module("terrazzo._torch.launching").fork_is_usable():
            os.execve(sys.executable, [sys.executable, "-u", *request["arguments"]], os.environ)
        sys.modules["torch"].default_generator.seed()  # random, as that of a new process
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        importlib.invalidate_caches()
        sys.path[:] = self._path
        return list(request["arguments"])


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` as Python does."""
    first = os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))
    if not sys.flags.safe_path:
        sys.path.insert(0, first)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    main = ModuleType("__main__")
    main.__file__ = arguments[0]
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open(arguments[0], "rb") as file:
        code = compile(file.read(), arguments[0], "exec", dont_inherit=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    server = ForkServer()
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        _request = server.serve(_connection)
    run(server.become(*_request))
