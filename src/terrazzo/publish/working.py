"""What `Publisher` and `Receiver` share: steps that all ranks take together, and work on a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Generic, TypeVar

from terrazzo._threads import Worker, of_this_process
from terrazzo.checkpoint.run.background import Background
from terrazzo.checkpoint.run.coordination import Team, find_team, with_plane
from terrazzo.errors import PublishError

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
