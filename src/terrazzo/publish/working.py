"""What `Publisher` and `Receiver` share: steps that all ranks take together, and work on a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

from terrazzo._threads import of_this_process
from terrazzo.checkpoint.run.coordination import StepFailed, Team, find_team, with_plane
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import PublishError

Result = TypeVar("Result")


@contextmanager
def raising_step_errors() -> Iterator[None]:
    """Raise the error of a step that failed on some rank, as all ranks do, instead of `StepFailed`."""
    try:
        yield
    except StepFailed as failed:
        raise failed.error from failed.error.__cause__


class BackgroundWork(Generic[Result]):
    """The ranks of a `Publisher` or a `Receiver`, and its work on a background thread.

    No rank waits longer for another one than `timeout`.
    """

    def __init__(self, group: Any, timeout: timedelta | None, doing: str) -> None:
        self._group = group
        self._timeout = timeout
        self._doing = doing
        self._plane: ControlPlane | None = None
        self._future: Future[Result] | None = None

    def team(self) -> Team:
        """This rank among the others, for the main thread. Collective."""
        return find_team(self._group, doing=self._doing, timeout=self._timeout)

    def team_in_background(self) -> Team:
        """This rank among the others, with connections for the background thread. Collective, on the main thread."""
        team = find_team(self._group, doing=self._doing, alone=True, timeout=self._timeout)
        return team if len(team.ranks) == 1 else with_plane(team, self._own_plane)

    def _own_plane(self) -> ControlPlane:
        if self._plane is None:
            self._plane = ControlPlane.create(self._group, self._timeout, name="publish")
        self._plane = self._plane.renewed()
        return self._plane

    def start(self, work: Callable[[], Result]) -> Future[Result]:
        """Do the work on a thread. The interpreter waits for it when it exits."""
        future: Future[Result] = of_this_process(Future(), PublishError)

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: B036  # `outcome` returns it
                future.set_exception(error)

        self._future = future
        threading.Thread(target=run, name="terrazzo-publish").start()
        return future

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
        if self._plane is not None:
            self._plane.close()
            self._plane = None


def raise_if_any(team: Team, error: BaseException | None) -> None:
    """Raise on all ranks if some rank has an error: each its own, if all have one, because then it is the same error;
    else the error of the ranks that have one."""
    if all_true(team, error is None):
        return
    everywhere = all_true(team, error is not None)
    if everywhere and error is not None:
        raise error

    def fail() -> None:
        if error is not None:
            raise error

    team.together(fail)


def all_true(team: Team, yes: bool) -> bool:
    """Whether `yes` is true on all ranks."""
    return team.reduce(lambda: b"yes" if yes else b"", lambda said: b"yes" if all(said) else b"") == b"yes"


def doing(team: Team, what: str) -> Team:
    """`team`, with other words for what is being done, for its error messages."""
    return replace(team, doing=what)
