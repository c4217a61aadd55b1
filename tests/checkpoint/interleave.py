"""Two jobs on one store: one is paused before one of its operations until the other has ended."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import Any

from checkpoint.faults import OPERATIONS
from terrazzo.checkpoint.stores import MemoryStore, Store

END = 10_000  # more than any job has operations


class Death(BaseException):
    """What a job that has died does: nothing more."""


class Pause:
    """Pauses the threads of a job before its operation number `at`; or lets it die there, if it `dies`."""

    def __init__(self, at: int = END, dies: bool = False) -> None:
        self.at = at
        self.dies = dies
        self.count = 0
        self.reached, self.go = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            number, self.count = self.count, self.count + 1
        if self.dies and number >= self.at:
            raise Death
        if number == self.at:
            self.reached.set()
            assert self.go.wait(60)


def _paused(name: str) -> Any:
    def call(store: PausingStore, *arguments: Any, **options: Any) -> Any:
        store._pause.step()
        return getattr(store._store, name)(*arguments, **options)

    return call


class PausingStore(Store):
    """A store as one job uses it; all that is not here is made of these operations, as in an object store."""

    upload, read, get, put, list, delete = map(_paused, ("upload", "read", "get", "put", "list", "delete"))

    def __init__(self, store: MemoryStore, pause: Pause, lease_seconds: float = 3600.0) -> None:
        self._store = store
        self._pause = pause
        self.lease_seconds = lease_seconds

    @property
    def location(self) -> str:
        return self._store.location

    def folders(self) -> Any:
        return self._store.folders()

    def beneath(self, name: str) -> PausingStore:
        return PausingStore(self._store.beneath(name), self._pause, self.lease_seconds)

    def now(self) -> float:
        return self._store.now()


class PausingSystem:
    """`os` as one job's `LocalStore` uses it."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        function = fcntl.flock if name == "flock" else getattr(os, name)
        if name not in OPERATIONS:
            return function

        def paused(*arguments: Any) -> Any:
            self._pause.step()
            return function(*arguments)

        return paused


def interleaved(at: int, first: Callable[[Pause], Any], second: Callable[[], Any]) -> tuple[Any, Any, bool]:
    """What both return or raise, where the second runs while the first is paused; and whether it was."""
    pause, ends = Pause(at), []

    def run() -> None:
        ends.append(end_of(lambda: first(pause)))
        pause.reached.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert pause.reached.wait(60)
    paused = not ends
    other = end_of(second)
    pause.go.set()
    thread.join(60)
    return ends[0], other, paused


def end_of(call: Callable[[], Any]) -> Any:
    """What a call returns or raises."""
    try:
        return call()
    except Exception as error:
        return error
