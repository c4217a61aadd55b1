"""A Python that starts in no time, because it is forked from one that has imported PyTorch already.

    python = warm_python()                      # a path, for whatever starts `python`
    subprocess.run([python, "-m", "terrazzo", "train", ...], env={**os.environ, "PYTHON_EXEC": python})

For tests of programs that start programs: what is run, by whom and in which process is as always, only its imports are
there at once.  `PYTHON_EXEC` is what torchrun calls for its ranks.  What a test says of imports needs the real Python.

The path is a small script.  Started, it hands its arguments, environment, folder, standard streams and network to a
server, which forks a process for them; it forwards signals to that, and ends as it does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_servers: dict[tuple[str, ...], str] = {}


def warm_python(*modules: str) -> str:
    """The path of a Python that has these modules; by default, what ranks need.  Lives as long as the session."""
    import atexit
    import shutil
    import subprocess
    import tempfile

    modules = modules or ("terrazzo.engine", "terrazzo.launch.torchrun", "torch._dynamo")
    if modules not in _servers:
        folder = tempfile.mkdtemp(prefix="warm-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path, sockets = f"{folder}/python", f"{folder}/socket"
        with open(path, "w") as script:
            script.write(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" connect "{sockets}" "$@"\n')
        os.chmod(path, 0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sockets)
        listener.listen(64)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # It ends when its standard input does, which this process holds.
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[listener.fileno()],
        )
        listener.close()
        atexit.register(server.kill)
        _servers[modules] = path
    return _servers[modules]


# ------------------------------------------------------------------ the process that was started


def connect(path: str, *arguments: str) -> None:
    """Have the server run this, and end as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid()}
        text = json.dumps(request).encode()
        socket.send_fds(server, [struct.pack("i", len(text))], [0, 1, 2])
        server.sendall(text)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
        status = server.recv(4)
    code = struct.unpack("i", status)[0] if len(status) == 4 else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# ------------------------------------------------------------------ the server


def serve(listener: socket.socket, modules: list[str]) -> None:
    """Import, then fork a process for each that connects, until the session ends."""
    import gc
    import importlib
    import select

    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os._exit(_watch(connection))
        connection.close()


def _watch(connection: socket.socket) -> int:
    """Fork the program; hand it signals, and its end to who waits for it."""
    import select

    header, streams, _, _ = socket.recv_fds(connection, 4, 3)
    length, text = struct.unpack("i", header)[0], b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    request = json.loads(text)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request, streams)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            return 0
        number = connection.recv(1)
        if not number:  # who waits for it was killed
            os.kill(child, signal.SIGKILL)
            return 0
        os.kill(child, number[0])


def _become(request: dict, streams: list[int]) -> None:
    """Run `[-u] SCRIPT ...` or `[-u] -m MODULE ...` as Python does, and end."""
    import atexit
    import ctypes
    import runpy
    import threading

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
    network = f"/proc/{request['pid']}/ns/net"
    if os.readlink(network) != os.readlink("/proc/self/ns/net"):
        with open(network) as namespace:
            clone_newnet = 0x40000000
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_newnet):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    arguments = request["arguments"]
    if arguments[0] == "-u":
        arguments = arguments[1:]
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    code = 0
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if code and not isinstance(exit.code, int):
            print(exit.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    else:
        connect(*sys.argv[2:])
