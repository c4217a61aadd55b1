"""Local ranks, from the side of the process that calls functions on them.

* A *fork server* imports torch and terrazzo once (`preloaded`), before it has any thread, and every rank is forked from
  it: so starting or replacing a rank imports nothing.
* A function is sent by reference (module, file, qualified name), arguments and results by pickle. A rank loads a test
  module from its file under the name that pytest gave it, with pytest's assertion rewriting.
* This process hosts each world's store, as torchrun's agent does, so the store survives the death of a rank.
* A rank runs one torch thread, has the default gloo group over loopback, and has RANK, WORLD_SIZE and the like in its
  environment. Between calls the seeds, default dtype, grad mode, environment and working directory are restored.
* Every call has a time limit. If it is exceeded, every rank writes the stacks of its Python threads and is killed.
* The world is replaced after any failure, or once calls have left many threads behind (process groups have threads);
  not within a test of pytest's, whose calls may have left more than threads in the ranks.
* Ranks end with this process, however it ends: they are tied to the fork server, which is tied to this process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from terrazzo._meant import signal_name
from terrazzo.testing.process import PYTHONPATH_BEFORE, Reply, Request, Start, serve

_START_LIMIT = 120.0  # seconds for the ranks of a world to find each other, on a busy machine
_GRACE = 10.0  # seconds for the other ranks once one has failed: they may be waiting for it forever
_DUMP_LIMIT = 5.0  # seconds for a hung rank to write its stacks
_END_LIMIT = 60.0  # seconds for a process that has closed its connection to be gone
_MAX_THREADS = 200  # a rank with more is replaced
_LOOK = 0.25  # seconds between two looks at what ranks have printed
_MAX_OUTPUT = 20_000  # characters of one rank's output in a report, the last ones


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung. The message says what happened on every rank."""


@dataclass(frozen=True)
class Outcome:
    """What happened on one rank: the function returned `value` or raised, or the rank died or hung until the limit."""

    rank: int
    value: Any = None
    error: str | None = None  # the traceback, if it raised
    exitcode: int | None = None  # if it died: its exit status, or minus the signal that killed it
    hung: bool = False
    stacks: str = ""  # of all its threads, if it hung
    output: str = ""  # what it wrote to stdout and stderr
    after: int = 0  # how many ranks had returned, failed or died before it

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
            what = f"was killed by {signal_name(self.signal)}"
        elif self.exitcode is not None:
            what = f"exited with status {self.exitcode}"
        elif self.hung:
            what = f"had not finished; its stacks:\n{self.stacks or '(none written: the process did not react)'}"
        else:
            what = "returned"
        output = f"\n[its output]\n{self.output[-_MAX_OUTPUT:].rstrip()}" if self.output and not self.ok else ""
        return f"=== rank {self.rank} {what.rstrip()}{output}"


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(*args)` on each of `world` local ranks, and return their results in rank order.

    The ranks are kept for later calls with this `world`, which then take milliseconds. What a call leaves in their
    modules is kept until the test ends that pytest is running; then the ranks may be replaced. If any rank does not
    return, `RanksFailed` has the traceback, exit status or stacks of every rank, and the next call starts new ranks.

    >>> import torch
    >>> run_ranks(2, torch.distributed.get_rank)
    [0, 1]
    >>> close_all()

    Args:
        fn: A function at module level. It is sent by name, its arguments and results by pickle.
        timeout: Seconds after which ranks that have not returned write their stacks and are killed.
    """
    __tracebackhide__ = True
    if world < 1:
        raise ValueError(f"world must be at least 1, not {world}")
    request = Request.of(fn, args)
    pool = _pools.get(world)
    test = _present_test()
    if pool is not None and pool.is_worn and (test is None or test != pool.last_test):
        _pools.pop(world).close()
        pool = None
    if pool is None:
        pool = _pools[world] = World(world, request)
    pool.last_test = test
    intact = False
    try:
        outcomes = pool.call(request, timeout, grace=_GRACE)
        intact = all(outcome.ok for outcome in outcomes)
    finally:  # also when interrupted: ranks in the middle of a call cannot be used again
        if not intact:
            _pools.pop(world).close()
    for outcome in outcomes:
        if outcome.ok and outcome.output:
            print(f"[rank {outcome.rank}]", outcome.output, end="")
    _raise_failures(request, outcomes)
    return [outcome.value for outcome in outcomes]


def _present_test() -> str | None:
    """The test that pytest is running, if it is running one."""
    said = os.environ.get("PYTEST_CURRENT_TEST")  # and whether it is being set up, called or torn down
    return None if said is None else said.rpartition(" ")[0]


def run_fresh(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, awaited: Collection[int] | None = None
) -> list[Outcome]:
    """Call `fn(*args)` on `world` new ranks; a rank that fails or dies is a result, not an error.

    Returns one `Outcome` per rank. After a death the other ranks may go on until `timeout` seconds. If only some ranks
    are `awaited`, the others are ended when these are done, and count as hung if they are not done by then.

    >>> import os
    >>> [outcome.exitcode for outcome in run_fresh(2, os._exit, 3)]
    [3, 3]
    """
    __tracebackhide__ = True
    request = Request.of(fn, args)
    ranks = World(world, request)
    try:
        return ranks.call(request, timeout, timeout, awaited)
    finally:
        ranks.close()


def preload(*modules: str) -> None:
    """Make ranks start with these modules imported, which saves time. Call it before the first rank starts.

    A module that starts a thread when it is imported cannot be preloaded.

    >>> preload("json")
    """
    global _preloaded
    _preloaded = (*_preloaded, *modules)
    _context.set_forkserver_preload(list(_preloaded))


def close_all() -> None:
    """End all ranks that were kept.

    >>> close_all()
    """
    while _pools:
        _pools.popitem()[1].close()


def _raise_failures(request: Request, outcomes: Sequence[Outcome]) -> None:
    __tracebackhide__ = True
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        title = f"{len(failed)} of {len(outcomes)} ranks failed in {request.module}.{request.function}"
        raise RanksFailed("\n".join([title, *map(str, in_order_of_failure(outcomes))]))


def in_order_of_failure(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, those of ranks that failed first; others often fail later because of the first one."""
    return sorted(outcomes, key=lambda outcome: (outcome.ok, outcome.hung, outcome.after))


# ------------------------------------------------------------------ the processes


class World:
    """The processes of one world, and the store through which they find each other.

    They have loaded the module of the first request before its time limit starts. Close it at the end.
    """

    def __init__(self, size: int, first: Request) -> None:
        self.is_worn = False  # has ranks with many threads
        self.last_test: str | None = None  # of which a call was
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[_Rank] = []
        _start_fork_server()
        try:
            for rank in range(size):
                self._ranks.append(_Rank(rank, size, self._store.port, self._folder, first))
            where = "(at the start; a script has to call this below `if __name__ == '__main__':`)"
            _raise_failures(replace(first, function=where), self.end(_START_LIMIT, grace=_GRACE))
        except BaseException:
            self.close()
            raise

    def call(
        self,
        request: Request,
        timeout: float,
        grace: float,
        awaited: Collection[int] | None = None,
        watch: Callable[[list[str]], None] | None = None,
    ) -> list[Outcome]:
        """`begin` and `end`."""
        self.begin(request)
        return self.end(timeout, grace, awaited, watch)

    def begin(self, request: Request) -> None:
        """Start a call on all ranks, and return; `end` follows."""
        for rank in self._ranks:
            rank.send(request)

    @property
    def has_ended(self) -> bool:
        """Whether each rank has returned from the call, or died."""
        return all(wait(rank.sources, 0) for rank in self._ranks)

    @property
    def pids(self) -> list[int]:
        """The processes that are alive."""
        return [pid for rank in self._ranks if (pid := rank.pid) is not None]

    def close(self) -> None:
        """Kill the processes and those that they started."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(
        self,
        timeout: float,
        grace: float = _GRACE,
        awaited: Collection[int] | None = None,
        watch: Callable[[list[str]], None] | None = None,
    ) -> list[Outcome]:
        """Wait for every rank's (or every awaited one's) reply or death, at most `timeout` seconds and at most `grace`
        after a failure. Meanwhile `watch` gets what each rank has printed so far, again and again."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while pending := [rank for rank in self._ranks if rank.index not in outcomes]:
            if awaited is not None and all(rank in outcomes for rank in awaited):
                deadline = time.monotonic()
            left = deadline - time.monotonic()
            ready = wait([source for rank in pending for source in rank.sources], min(left, _LOOK) if watch else left)
            if watch is not None and not ready and left > _LOOK:
                watch([rank.output() for rank in self._ranks])
                continue
            if not ready:
                outcomes |= {outcome.rank: outcome for outcome in _dump_hung(pending)}
            for rank in pending:
                if not ready or not any(source in ready for source in rank.sources):
                    continue
                outcome, threads = rank.outcome()
                outcomes[rank.index] = replace(outcome, after=len(outcomes))
                self.is_worn = self.is_worn or threads > _MAX_THREADS
                if not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        return [replace(outcomes[rank.index], output=rank.output()) for rank in self._ranks]


class _Rank:
    """One process, from the session's side."""

    def __init__(self, index: int, world: int, port: int, folder: Path, first: Request) -> None:
        self.index = index
        self._log = folder / f"{index}.log"
        self._stacks = folder / f"{index}.stacks"
        self._connection, theirs = _context.Pipe()
        start = Start(index, world, port, str(self._log), str(self._stacks), first)
        self._process = _context.Process(target=serve, args=(theirs, start), name=f"rank{index}")
        self._process.start()
        theirs.close()
        self.sources: tuple[Connection | int, ...] = (self._connection, self._process.sentinel)

    def send(self, request: Request) -> None:
        os.truncate(self._log, 0)  # what it prints from now on is this call's
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the rank is dead, which `outcome` reports

    def outcome(self) -> tuple[Outcome, int]:
        """For a rank that has replied or died: what happened, and how many threads it has now."""
        try:
            if self._connection.poll():
                reply: Reply = pickle.loads(self._connection.recv_bytes())
                return Outcome(self.index, reply.value, reply.error), reply.threads
        except (EOFError, ConnectionResetError):
            pass  # it closed the connection without a reply
        self._process.join(_END_LIMIT)
        return Outcome(self.index, exitcode=self._process.exitcode, hung=self._process.exitcode is None), 0

    @property
    def pid(self) -> int | None:
        """Its process, if that is alive."""
        return self._process.pid if self._process.is_alive() else None

    def ask_for_stacks(self) -> None:
        if (pid := self.pid) is not None:
            os.kill(pid, signal.SIGUSR1)

    def stacks(self) -> str:
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """Ends the process and those that it started, which are in its process group."""
        if (pid := self.pid) is not None:
            for end in (os.killpg, os.kill):  # kill for a rank that has no process group yet
                try:
                    end(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._process.join()
        self._connection.close()


def _start_fork_server() -> None:
    """Starts it unless it runs.

    Its imports before the fork are found through PYTHONPATH, because it gets sys.path later; `preloaded` restores that.
    Ranks share few cores, and a fork server must have no threads, so numerical libraries are set to start none.
    """
    before = dict(os.environ)
    os.environ[PYTHONPATH_BEFORE] = before.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _dump_hung(ranks: Sequence[_Rank]) -> list[Outcome]:
    """Makes every rank write its stacks, and waits until they are complete."""
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
# torch._dynamo, because every optimizer imports it.
_preloaded: tuple[str, ...] = ("torch._dynamo", "terrazzo.testing.preloaded")
_context.set_forkserver_preload(list(_preloaded))
_pools: dict[int, World] = {}
atexit.register(close_all)
