"""Saving in the background: one save in flight per process group, on a thread or in a process.

The state is copied first (`staging`); only the copy delays training. The background has its own connections, so its
messages are never mixed with those of training. An error is raised by the future's `result()`, or, if that is not
called, by the next save.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.run.coordination import StepFailed, Team
from terrazzo.checkpoint.run.process_saver import ProcessSaver
from terrazzo.checkpoint.run.staging import BlockingAsyncStager
from terrazzo.comm.control import ControlPlane, time_limit_of
from terrazzo.errors import CheckpointError


class SaveFuture(Future[Metadata]):
    """The result of a save in the background; `asked` is whether the caller has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.set_running_or_notify_cancel()  # a save cannot be cancelled: other ranks take part

    def result(self, timeout: float | None = None) -> Metadata:
        try:
            return super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.asked = self.asked or self.done()

    def settle(self, work: Callable[[], Metadata]) -> None:
        """Do the work, and set its result or its error."""
        try:
            value = work()
        except BaseException as error:  # noqa: B036  # raised by `result`
            self.set_exception(error)
        else:
            self.set_result(value)


class AsyncSaveResponse(SaveFuture):
    """The result of a save whose state is also copied in the background.

    `staging_completion` is done when the state has been copied and may be changed, `upload_completion` (this future
    itself) when the checkpoint is complete.
    """

    def __init__(self, staging_completion: Future[Any]) -> None:
        super().__init__()
        self.staging_completion = staging_completion

    @property
    def upload_completion(self) -> Future[Metadata]:
        """Done when the checkpoint is complete."""
        return self


class Background:
    """The save in flight of one process group on this rank, and what is kept between saves."""

    def __init__(self) -> None:
        self._beginning = threading.Lock()
        self._future: SaveFuture | None = None
        self._thread: threading.Thread | None = None
        self._plane: ControlPlane | None = None
        self._process: ProcessSaver | None = None
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While the context lasts no other thread begins a save, and none is in flight.

        Not while waiting: what is called when a save has ended, on its thread, may begin the next one.
        """
        while True:
            self.wait()
            with self._beginning:
                if self._in_flight() is None:
                    yield
                    return

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        thread = self._in_flight()
        if thread is not None:
            thread.join()

    def _in_flight(self) -> threading.Thread | None:
        """The thread of the save in flight; a callback of its future, which has its result, does not see it."""
        thread = self._thread
        return thread if thread is not None and thread.is_alive() and thread is not threading.current_thread() else None

    def earlier_error(self) -> CheckpointError | None:
        """The error of the last save, if the caller on this rank has not seen it; then this save fails with it.

        This rank takes part in the save and fails, so that the save fails on all ranks. This needs no communication
        here; other ranks may have seen their error, or had none.
        """
        self.wait()
        future, self._future = self._future, None
        if future is None or future.asked:
            return None
        error = future.exception()
        if error is None:
            return None
        failed = CheckpointError(f"the save in the background before this one failed: {error}")
        failed.__cause__ = error
        return failed

    def plane(self, group: Any, timeout: timedelta | None) -> ControlPlane:
        """Connections for the background, with this time limit or the group's own. Collective when they are made: at
        the first call, and after they broke."""
        group = group if group is not None else dist.group.WORLD
        if self._plane is None:
            self._plane = ControlPlane.create(group, timeout, name="checkpoint")
        self._plane = self._plane.renewed(timeout or time_limit_of(group))
        return self._plane

    def process(self, team: Team, timeout: timedelta | None) -> ProcessSaver:
        """The process that saves; started on all ranks if there is none or one has died. Collective."""
        alive = self._process is not None and self._process.alive
        try:
            everyone = team.reduce(
                lambda: b"alive" if alive else b"", lambda replies: b"alive" if all(replies) else b""
            )
            if not everyone:
                if self._process is not None:
                    self._process.close()
                self._process = ProcessSaver(team, timeout)
        except StepFailed as failed:
            raise failed.error from failed.error.__cause__
        assert self._process is not None
        return self._process

    def start(self, work: Callable[[], Metadata], future: SaveFuture | None = None) -> SaveFuture:
        """Do the work on a thread."""
        future = future or SaveFuture()
        self._future = future
        # The thread waits for this event. Otherwise it would take the interpreter's lock, which this thread needs to
        # return, and keep it for 5 ms or longer.
        may_begin = threading.Event()

        def run() -> None:
            may_begin.wait()
            future.settle(work)

        # Not a daemon: a process that ends waits for its checkpoint.
        thread = threading.Thread(target=run, name="terrazzo-save")
        try:
            thread.start()
            self._thread = thread
        finally:
            may_begin.set()
        return future

    def close(self) -> None:
        """Wait for the save in flight and release everything."""
        self.wait()
        self.stager.close()
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._plane is not None:
            self._plane.close()
            self._plane = None


_by_group: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()
_without_group = Background()
_of_parent: list[object] = []


def _in_forked_process() -> None:
    """Begin anew: the threads and connections are the parent's. They are kept, because to end them means to wait."""
    global _by_group, _without_group
    _of_parent.append((_without_group, dict(_by_group)))
    _by_group, _without_group = weakref.WeakKeyDictionary(), Background()


os.register_at_fork(after_in_child=_in_forked_process)


def background_of(process_group: Any, no_dist: bool) -> Background:
    """The background for a process group (None: all ranks)."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return _without_group
    group = process_group if process_group is not None else dist.group.WORLD
    background = _by_group.get(group)
    if background is None:
        background = _by_group[group] = Background()
    return background
