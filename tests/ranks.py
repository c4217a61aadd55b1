"""Runs a test function on several local ranks, as `torchrun` would run a program, and says what each rank did.

    from ranks import run_ranks

    def check_sum(scale):
        x = torch.ones(2) * scale
        dist.all_reduce(x)
        return x.sum().item()

    def test_sum():
        assert run_ranks(2, check_sum, 3.0) == [12.0, 12.0]

`run_ranks` serves worlds 1, 2 and 4 from processes that live for the whole test session, so that a call costs
milliseconds.  `run_fresh` starts processes for one call, for tests in which ranks die.  What both rely on:

* A *fork server* imports torch once, before it has any thread, and every rank is forked from it: starting or
  replacing a rank costs no import.
* A function travels by reference (module, file, qualified name), arguments and results by pickle.  A rank loads a
  test module from its file under the name that pytest gave it, with pytest's assertion rewriting.
* The session's process hosts each world's store, as torchrun's agent does: a rank's death does not take it along.
* A rank runs one torch thread, has the default gloo group over loopback, and finds RANK, WORLD_SIZE and the like in
  its environment.  Between calls the seeds, default dtype, grad mode, environment and working directory are set back.
* No call outlives its time limit.  At the limit every rank writes all its Python stacks, and is killed.
* After any failure, or once tests have left many threads behind (each process group owns some), the world is replaced.
* Ranks die with the session, however it ends: they are tied to the fork server, which is tied to the session.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# Ranks share few cores, and a fork server must have no threads: this has to be said before torch and numpy start any.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

WORLDS = (1, 2, 4)
SEED = 1234

_START_LIMIT = 120.0  # seconds for the ranks of a world to find each other, on a busy machine
_GRACE = 10.0  # seconds that the others get once one rank has failed: they may be waiting for it for ever
_DUMP_LIMIT = 5.0  # seconds for a hung rank to write its stacks
_MAX_THREADS = 200  # a rank with more is replaced before the next test
_MAX_OUTPUT = 20_000  # characters of one rank's output in a report, the last ones
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "torch.testing", "numpy", "pytest"]

_TESTS = Path(__file__).resolve().parent


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung. The message holds what every rank did."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did with the function: returned `value`, or raised, or died, or hung until the limit."""

    rank: int
    value: Any = None
    error: str | None = None  # the traceback, if it raised
    exitcode: int | None = None  # if it died: its exit status, or minus the signal that killed it
    hung: bool = False
    stacks: str = ""  # of all its threads, if it hung
    output: str = ""  # what it wrote to stdout and stderr

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode is None and not self.hung

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the rank."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None

    def __str__(self) -> str:
        if self.error is not None:
            what = f"failed\n{self.error}"
        elif self.signal is not None:
            what = f"was killed by {signal.Signals(self.signal).name}"
        elif self.exitcode is not None:
            what = f"exited with status {self.exitcode}"
        elif self.hung:
            what = f"had not finished; its stacks:\n{self.stacks or '(none written: the process did not react)'}"
        else:
            what = "returned"
        output = f"\n[its output]\n{self.output[-_MAX_OUTPUT:].rstrip()}" if self.output and not self.ok else ""
        return f"=== rank {self.rank} {what.rstrip()}{output}"


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Calls `fn(*args)` on each of `world` persistent ranks and returns their results in rank order.

    `fn` is a module-level function, `world` one of 1, 2, 4. If any rank does not return, raises `RanksFailed` with
    the traceback, exit status or stacks of every rank, and the next call gets new processes.
    """
    __tracebackhide__ = True
    if world not in WORLDS:
        raise ValueError(f"run_ranks serves worlds {WORLDS}, not {world}; run_fresh takes any")
    request = _Request.of(fn, args)
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = _World(world, request)
    intact = False
    try:
        outcomes = pool.call(request, timeout, grace=_GRACE)
        intact = pool.reusable and all(outcome.ok for outcome in outcomes)
    finally:  # also when interrupted: ranks in the middle of a call are of no use to the next
        if not intact:
            _pools.pop(world).close()
    for outcome in outcomes:
        if outcome.ok and outcome.output:
            print(f"[rank {outcome.rank}]", outcome.output, end="")
    _raise_failures(request, outcomes)
    return [outcome.value for outcome in outcomes]


def run_fresh(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Outcome]:
    """Calls `fn(*args)` on `world` new ranks, whose failures and deaths are results like any other.

    Returns one `Outcome` per rank. The survivors of a death may go on until `timeout` seconds.
    """
    __tracebackhide__ = True
    request = _Request.of(fn, args)
    ranks = _World(world, request)
    try:
        return ranks.call(request, timeout, grace=timeout)
    finally:
        ranks.close()


def close_all() -> None:
    """Ends every persistent rank."""
    while _pools:
        _pools.popitem()[1].close()


def _raise_failures(request: _Request, outcomes: Sequence[Outcome]) -> None:
    __tracebackhide__ = True
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        title = f"{len(failed)} of {len(outcomes)} ranks failed in {request.module}.{request.function}"
        raise RanksFailed("\n".join([title, *map(str, outcomes)]))


# ------------------------------------------------------------------ what travels


@dataclass(frozen=True)
class _Request:
    """A call: which function of which module, and its pickled arguments."""

    module: str
    file: str
    function: str
    args: bytes

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Request:
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} cannot be sent to ranks: define it at module level")
        module = sys.modules[fn.__module__]
        return cls(fn.__module__, module.__file__ or "", fn.__qualname__, pickle.dumps(args))

    def load(self) -> ModuleType:
        """The module; one that is a test file is loaded from there, as it is in no package."""
        if self.module in sys.modules or _TESTS not in Path(self.file).parents:
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
class _Start:
    """What a rank is born with."""

    rank: int
    world: int
    port: int
    log: str
    stacks: str
    first: _Request


@dataclass(frozen=True)
class _Reply:
    value: Any
    error: str | None
    threads: int


class _TestLoader(SourceFileLoader):
    """Loads a module as pytest does: a failing `assert` shows its values. Leaves no bytecode file."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


# ------------------------------------------------------------------ the session's side


class _World:
    """The processes of one world, and the store through which they find each other.

    They have loaded the module of the first request before its time limit begins.
    """

    def __init__(self, size: int, first: _Request) -> None:
        self.reusable = True
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[_Rank] = []
        try:
            for rank in range(size):
                self._ranks.append(_Rank(rank, size, self._store.port, self._folder, first))
            _raise_failures(replace(first, function="(at the start)"), self._collect(_START_LIMIT, grace=_GRACE))
        except BaseException:
            self.close()
            raise

    def call(self, request: _Request, timeout: float, grace: float) -> list[Outcome]:
        for rank in self._ranks:
            rank.send(request)
        return self._collect(timeout, grace)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, timeout: float, grace: float) -> list[Outcome]:
        """Waits for every rank's reply or death, at most `timeout` seconds and at most `grace` after a failure."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while pending := [rank for rank in self._ranks if rank.index not in outcomes]:
            ready = wait([source for rank in pending for source in rank.sources], deadline - time.monotonic())
            if not ready:
                outcomes |= {outcome.rank: outcome for outcome in _dump_hung(pending)}
            for rank in pending:
                if not ready or not any(source in ready for source in rank.sources):
                    continue
                outcome, threads = rank.outcome()
                outcomes[rank.index] = outcome
                self.reusable = self.reusable and threads <= _MAX_THREADS
                if not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        return [replace(outcomes[rank.index], output=rank.output()) for rank in self._ranks]


class _Rank:
    """One process, seen from the session."""

    def __init__(self, index: int, world: int, port: int, folder: Path, first: _Request) -> None:
        self.index = index
        self._log = folder / f"{index}.log"
        self._stacks = folder / f"{index}.stacks"
        self._connection, theirs = _context.Pipe()
        start = _Start(index, world, port, str(self._log), str(self._stacks), first)
        self._process = _context.Process(target=_serve, args=(theirs, start), name=f"rank{index}")
        self._process.start()
        theirs.close()
        self.sources: tuple[Connection | int, ...] = (self._connection, self._process.sentinel)

    def send(self, request: _Request) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead, which `outcome` reports

    def outcome(self) -> tuple[Outcome, int]:
        """Of a rank with something to read or that has died: what became of it, and how many threads it now has."""
        try:
            if self._connection.poll():
                reply: _Reply = pickle.loads(self._connection.recv_bytes())
                return Outcome(self.index, reply.value, reply.error), reply.threads
        except (EOFError, ConnectionResetError):
            pass  # closed without a reply
        self._process.join(_DUMP_LIMIT)
        return Outcome(self.index, exitcode=self._process.exitcode, hung=self._process.exitcode is None), 0

    def ask_for_stacks(self) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """Ends the process, and those that it started: it leads a process group of its own."""
        if self._process.is_alive() and self._process.pid is not None:
            for end in (os.killpg, os.kill):  # the second for a rank too young to lead a group
                try:
                    end(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._process.join()
        self._connection.close()


def _dump_hung(ranks: Sequence[_Rank]) -> list[Outcome]:
    """Makes every rank write its stacks, and waits until they are there and no longer grow."""
    for rank in ranks:
        rank.ask_for_stacks()
    deadline = time.monotonic() + _DUMP_LIMIT
    before = [""] * len(ranks)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = [rank.stacks() for rank in ranks]
        if all(now) and now == before:
            break
        before = now
    return [Outcome(rank.index, hung=True, stacks=rank.stacks()) for rank in ranks]


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
_pools: dict[int, _World] = {}
atexit.register(close_all)


# ------------------------------------------------------------------ the ranks' side


def _serve(connection: Connection, start: _Start) -> None:
    """The life of a rank: set up, then answer requests until the session closes the connection."""
    _die_with_session()
    os.setsid()  # an interrupt at the keyboard is for the session, which then ends its ranks
    _write_to(start.log)
    faulthandler.enable()
    with open(start.stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        connection.send_bytes(_answer(lambda: _set_up(start)))
        # What was imported so far stays for ever; without it a collection between tests takes next to no time.
        gc.collect()
        gc.freeze()
        environment, folder = dict(os.environ), os.getcwd()
        while True:
            try:
                request: _Request = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)  # not through destructors, which may wait for other ranks
            _set_back(environment, folder)
            connection.send_bytes(_answer(request.call))


def _die_with_session() -> None:
    """Has the kernel kill this process when the fork server ends, and lets that end when the session does.

    The fork server ends once nobody holds its lifeline, a pipe that multiprocessing also hands to every process that
    it forks, so that they can fork more. A rank gives it up: should it need a fork server, it gets its own.
    """
    lifeline = forkserver._forkserver._forkserver_alive_fd
    if lifeline is not None:
        os.close(lifeline)
        forkserver._forkserver._forkserver_alive_fd = forkserver._forkserver._forkserver_address = None
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before the call above
        os._exit(1)


def _write_to(log: str) -> None:
    """Sends stdout and stderr, those of C++ too, to a file that each call begins anew."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _set_up(start: _Start) -> None:
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
    """Undoes what an earlier test may have changed for the whole process."""
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    os.ftruncate(1, 0)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    gc.collect()


def _answer(call: Callable[[], Any]) -> bytes:
    """The pickled reply: what the call returned or how it failed."""
    value, error = None, None
    try:
        value = call()
        pickle.dumps(value)  # a result that cannot travel is the function's failure
    except BaseException as exception:  # SystemExit too: only os._exit and signals end a rank
        value, error = None, "".join(traceback.format_exception(exception))
    sys.stdout.flush()
    sys.stderr.flush()
    return pickle.dumps(_Reply(value, error, threads=len(os.listdir("/proc/self/task"))))
