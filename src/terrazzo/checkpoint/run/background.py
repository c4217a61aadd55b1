"""Saving in the background: one save in flight per process group, on a thread or in a process.

The state is copied first (`staging`); only the copy delays training. The background has its own connections, so its
messages are never mixed with those of training. An error is raised by the future's `result()`, or, if that is not
called, by the next save.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch.distributed as dist

from terrazzo._threads import Worker, of_this_process, streams_of_this_thread
from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.run.coordination import Team, find_team, with_plane
from terrazzo.checkpoint.run.process_saver import ProcessSaver
from terrazzo.checkpoint.run.staging import BlockingAsyncStager
from terrazzo.comm.control import ControlPlane, time_limit_of
from terrazzo.errors import CheckpointError, PublishError

# What saves import when they come to it. It is imported before their thread starts: a process that is forked while a
# thread imports a module can never import that module, because no thread holds the lock of the import.
_NEEDED: Final = ("numpy.ma", "torch.utils.serialization.config")


class SaveFuture(Future[Metadata]):
    """The result of a save in the background."""

    def __init__(self) -> None:
        super().__init__()
        of_this_process(self, CheckpointError)
        self._waiting = 0  # callers that are in `result` or `exception`
        self._returned = False  # one of these has returned the outcome
        self.set_running_or_notify_cancel()  # a save cannot be cancelled: other ranks take part

    @property
    def asked(self) -> bool:
        """Whether a caller has seen the outcome, or waits for it."""
        return self._returned or self._waiting > 0

    def result(self, timeout: float | None = None) -> Metadata:
        with self._asking():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._asking():
            return super().exception(timeout)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
        try:
            yield
        finally:
            with self._condition:
                self._waiting -= 1
                self._returned = self._returned or self.done()

    def settle(self, work: Callable[[], Metadata]) -> None:
        """Do the work, and set its result or its error."""
        try:
            value = work()
        except BaseException as error:  # noqa: B036  # raised by `result`
            if not self.done():  # it is, if what started the thread was interrupted
                self.set_exception(error)
        else:
            if not self.done():
                self.set_result(value)


@dataclass(eq=False)
class AsyncSaveResponse(SaveFuture):
    """The result of a save whose state is also copied in the background.

    `staging_completion` is done when the state has been copied and may be changed, `upload_completion` (this future
    itself) when the checkpoint is complete.
    """

    staging_completion: Future[Any]
    upload_completion: Future[Any] = field(default=None, repr=False)  # type: ignore[arg-type]  # then this future

    def __post_init__(self) -> None:
        super().__init__()
        if self.upload_completion is None:
            self.upload_completion = self
        else:  # of another program's save
            self.upload_completion.add_done_callback(lambda done: self.settle(done.result))


class Background:
    """The save in flight of one process group on this rank, and what is kept between saves."""

    def __init__(self, name: str = "checkpoint") -> None:
        self._name = name  # of its connections
        self._turns = threading.RLock()
        self._owner: int | None = None  # the thread whose turn it is
        self._nested: Background | None = None
        self._last: SaveFuture | None = None
        self._unseen: list[SaveFuture] = []  # saves whose errors the caller may not have seen
        self._plane: ControlPlane | None = None
        self._process: ProcessSaver | None = None
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    @contextmanager
    def turn(self) -> Iterator[Background]:
        """While the context lasts no other thread begins a save, and none is in flight. Gives what to begin it with.

        A thread that begins a save inside its own turn (in a signal handler, or in a `state_dict()` that saves) gets
        another background, with memory and connections of its own.
        """
        if self._owner == threading.get_ident():
            if self._nested is None:
                self._nested = Background(f"{self._name}, nested")
            with self._nested.turn() as nested:
                yield nested
            return
        while True:
            self.wait()
            with self._turns:
                if self._last is None or self._last.done():
                    self._owner = threading.get_ident()
                    try:
                        yield self
                    finally:
                        self._owner = None
                    return

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        if self._nested is not None:
            self._nested.wait()
        last = self._last
        if last is not None:
            wait_for((last,))

    def earlier_error(self) -> CheckpointError | None:
        """The error of an earlier save, if the caller on this rank has not seen it; then this save fails with it.

        This rank takes part in the save and fails, so that the save fails on all ranks. This needs no communication
        here; other ranks may have seen their error, or had none.
        """
        self.wait()
        nested = self._nested.earlier_error() if self._nested is not None else None
        done = [future for future in self._unseen if future.done()]
        for future in done:
            with suppress(ValueError):  # another thread may have removed it
                self._unseen.remove(future)
        errors = [error for future in done if not future.asked and (error := future.exception()) is not None]
        if not errors:
            return nested
        failed = CheckpointError(f"the save in the background before this one failed: {errors[-1]}")
        failed.__cause__ = errors[-1]
        return failed

    def plane(self, group: Any, timeout: timedelta | None) -> ControlPlane:
        """Connections for the background, with this time limit or the group's own. Collective when they are made: at
        the first call, and after they broke."""
        group = group if group is not None else dist.group.WORLD
        if self._plane is None:
            self._plane = ControlPlane.create(group, timeout, name=self._name)
        self._plane = self._plane.renewed(timeout or time_limit_of(group))
        return self._plane

    def process(self, team: Team, timeout: timedelta | None) -> ProcessSaver:
        """The process that saves; started on all ranks if there is none or one has died. Collective."""
        alive = self._process is not None and self._process.alive
        if not team.all_true(alive):
            if self._process is not None:
                self._process.close()
            self._process = ProcessSaver(team, timeout)
        assert self._process is not None
        return self._process

    def start(self, work: Callable[[], Metadata], future: SaveFuture | None = None) -> SaveFuture:
        """Do the work on a thread."""
        future = future or SaveFuture()
        for name in _NEEDED:
            importlib.import_module(name)
        # The thread waits for this event. Otherwise it would take the interpreter's lock, which this thread needs to
        # return, and keep it for 5 ms or longer.
        may_begin = threading.Event()

        take_streams = streams_of_this_thread()

        def work_as_here() -> Metadata:
            take_streams()
            return work()

        def run() -> None:
            may_begin.wait()
            future.settle(work_as_here)

        # Not a daemon: a process that ends waits for its checkpoint.
        thread = threading.Thread(target=run, name="terrazzo-save")
        try:
            self._last = future
            self._unseen.append(future)
            thread.start()
        except BaseException as error:
            if thread.ident is None:
                future.set_exception(error)
            raise
        finally:
            may_begin.set()
        return future

    def close(self) -> None:
        """Wait for the save in flight and release everything."""
        self.wait()
        if self._nested is not None:
            self._nested.close()
        self.stager.close()
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._plane is not None:
            self._plane.close()
            self._plane = None


_by_group: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()
_without_group = Background()
_finding = threading.RLock()
_of_parent: list[object] = []


def _in_forked_process() -> None:
    """Begin anew: the threads and connections are the parent's. They are kept, because to end them means to wait."""
    global _by_group, _without_group, _finding
    _of_parent.append((_without_group, dict(_by_group)))
    _by_group, _without_group, _finding = weakref.WeakKeyDictionary(), Background(), threading.RLock()


os.register_at_fork(after_in_child=_in_forked_process)


def background_of(process_group: Any, no_dist: bool) -> Background:
    """The background for a process group (None: all ranks)."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return _without_group
    group = process_group if process_group is not None else dist.group.WORLD
    with _finding:
        background = _by_group.get(group)
        if background is None:
            background = _by_group[group] = Background()
    return background


# ------------------------------------------------------------------ other work, for publishing


Result = TypeVar("Result")


class BackgroundWork(Generic[Result]):
    """The ranks of a `Publisher` or a `Receiver`, and its work on a background thread.

    No rank waits longer for another one than `timeout`.
    """

    def __init__(self, group: Any, timeout: timedelta | None, doing: str) -> None:
        self._group = group
        self._timeout = timeout
        self._doing = doing
        self._background = Background("publish")
        self._worker = Worker("terrazzo-publish")
        self._future: Future[Result] | None = None

    def team(self) -> Team:
        """This rank among the others, for the main thread. Collective."""
        return find_team(self._group, doing=self._doing, timeout=self._timeout)

    def team_in_background(self) -> Team:
        """This rank among the others, with connections for the background thread. Collective, on the main thread."""
        team = find_team(self._group, doing=self._doing, alone=True, timeout=self._timeout)
        if len(team.ranks) == 1:
            return team
        return with_plane(team, lambda: self._background.plane(self._group, self._timeout))

    def start(self, work: Callable[[], Result]) -> None:
        """Do the work on a thread. The interpreter waits for it when it exits."""
        self._future = of_this_process(self._worker.submit(work), PublishError)

    @property
    def running(self) -> Future[Result] | None:
        """The work that was started last, unless its outcome has been taken."""
        return self._future

    def outcome(self) -> tuple[Result | None, BaseException | None]:
        """Wait for the work, if any, and return its result and its error; the next call returns None for both."""
        future, self._future = self._future, None
        if future is None:
            return None, None
        error = future.exception()
        return (None, error) if error is not None else (future.result(), None)

    def close(self) -> None:
        """Close the connections."""
        self._background.close()


def raise_if_any(team: Team, error: BaseException | None) -> None:
    """Raise on all ranks if some rank has an error: each its own, if all have one, because then it is the same error;
    else the error of the ranks that have one."""
    if team.all_true(error is None):
        return
    everywhere = team.all_true(error is not None)
    if everywhere and error is not None:
        raise error

    def fail() -> None:
        if error is not None:
            raise error

    team.together(fail)
