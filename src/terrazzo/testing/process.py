"""What a rank is: a process that answers requests to call a function, and the messages that it exchanges."""

from __future__ import annotations

import ast
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import marshal
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SEED = 1234
_HASHED = (3).to_bytes(4, "little")  # of a compiled file: the flags that say that a hash of its source follows
PYTHONPATH_BEFORE = "TERRAZZO_TESTING_PYTHONPATH"
"""An environment variable of the fork server: the value of PYTHONPATH before it was started."""


@dataclass(frozen=True)
class Request:
    """A call: which function of which module, and its pickled arguments."""

    module: str
    file: str
    is_test: bool  # a module that pytest has loaded
    function: str
    args: bytes

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> Request:
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} cannot be sent to ranks by name: define it at module level")
        module = sys.modules[fn.__module__]
        is_test = type(getattr(module, "__loader__", None)).__module__.startswith("_pytest.")
        file = getattr(module, "__file__", None) or ""
        return cls(fn.__module__, file, is_test, fn.__qualname__, pickle.dumps(args))

    def load(self) -> ModuleType:
        """The module; one that pytest has loaded is loaded from its file, as it may not be in a package."""
        if self.module in sys.modules or not self.is_test:
            return importlib.import_module(self.module)
        loader = _TestLoader(self.module, self.file)
        spec = importlib.util.spec_from_loader(self.module, loader)
        assert spec is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module

    def call(self) -> Any:
        target: Any = self.load()
        for name in self.function.split("."):
            target = getattr(target, name)
        return target(*pickle.loads(self.args))


@dataclass(frozen=True)
class Start:
    """What a rank gets at its start."""

    rank: int
    world: int
    port: int
    log: str
    stacks: str
    first: Request


@dataclass(frozen=True)
class Reply:
    value: Any
    error: str | None
    threads: int


class _TestLoader(SourceFileLoader):
    """Loads a module as pytest does: a failing `assert` shows its values. Leaves no bytecode file."""

    def get_code(self, fullname: str) -> CodeType:
        rewrite: Any = importlib.import_module("_pytest.assertion.rewrite")  # present, as pytest has loaded the module
        data = self.get_data(self.path)
        code = self._compiled_by_pytest(rewrite, data)
        if code is not None:
            return code
        tree = ast.parse(data, self.path)
        rewrite.rewrite_asserts(tree, data, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def _compiled_by_pytest(self, rewrite: Any, source: bytes) -> CodeType | None:
        """The code in the file that the session's pytest has written; None if there is none, or of another source.

        Reading it is much faster than compiling.
        """
        try:
            folder, ending = rewrite.get_cache_dir(Path(self.path)), rewrite.PYC_TAIL
            data = (folder / f"{Path(self.path).stem}{ending}").read_bytes()
            if data[:16] != importlib.util.MAGIC_NUMBER + _HASHED + importlib.util.source_hash(source):
                return None
            code = marshal.loads(memoryview(data)[16:])
        except (OSError, AttributeError, ValueError, EOFError, TypeError):  # AttributeError: of another pytest
            return None
        return code if isinstance(code, CodeType) and code.co_filename == self.path else None


# ------------------------------------------------------------------ the main loop of a rank


def serve(connection: Connection, start: Start) -> None:
    """The main loop of a rank: set up, then answer requests until the session closes the connection."""
    _die_with_session()
    os.setsid()  # a keyboard interrupt goes to the session only, which then ends its ranks
    _write_to(start.log)
    faulthandler.enable()
    with open(start.stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        connection.send_bytes(_answer(lambda: _set_up(start)))
        environment, folder, modules = dict(os.environ), os.getcwd(), 0
        while True:
            try:
                request: Request = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)  # without destructors, which may wait for other ranks
            _set_back(environment, folder)
            gc.collect()
            if len(sys.modules) != modules:
                # Imported modules stay forever; frozen, they are skipped by garbage collections.
                gc.freeze()
                modules = len(sys.modules)
            connection.send_bytes(_answer(request.call))


def _die_with_session() -> None:
    """Make the kernel kill this process when the fork server ends, and the fork server end when the session does.

    The fork server ends when no process holds its lifeline, a pipe that multiprocessing also passes to every process
    that it forks, so that they can fork more. A rank closes it; if a rank needs a fork server, it starts its own.
    """
    server: Any = forkserver._forkserver  # multiprocessing has no public way to do this
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # the fork server ended before the call above
        os._exit(1)


def _write_to(log: str) -> None:
    """Sends stdout and stderr, also those of C++, to a file that each call overwrites."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _set_up(start: Start) -> None:
    """Joins the world and loads the module of the first request."""
    os.environ |= {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(start.rank),
        "WORLD_SIZE": str(start.world),
        "LOCAL_WORLD_SIZE": str(start.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(start.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", start.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.world, timeout=timedelta(minutes=5))
    start.first.load()


def _set_back(environment: dict[str, str], folder: str) -> None:
    """Undoes what an earlier test may have changed in the process."""
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    os.ftruncate(1, 0)
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _answer(call: Callable[[], Any]) -> bytes:
    """The pickled reply: what the call returned or how it failed."""
    value, error = None, None
    try:
        value = call()
        pickle.dumps(value)  # a result that cannot be pickled counts as a failure of the function
    except BaseException as exception:  # also SystemExit: only os._exit and signals end a rank
        frames = exception.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        value, error = None, "".join(traceback.format_exception(exception.with_traceback(frames)))
    sys.stdout.flush()
    sys.stderr.flush()
    return pickle.dumps(Reply(value, error, threads=len(os.listdir("/proc/self/task"))))
