"""Threads that may be started while the interpreter ends.

A process that ends waits for its saves, and for what follows them. By then executors of `concurrent.futures` accept no
more work, so what used one would fail, without an error that the program sees.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")


def results_of(calls: Sequence[Callable[[], T]], threads: int, name: str) -> list[T]:
    """The results of all calls, of which so many run at once; or the first error, when all that had begun have ended.

    >>> results_of([lambda: 1, lambda: 2, lambda: 3], 2, "example")
    [1, 2, 3]
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    left = iter(enumerate(calls))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number, call = next(left, (-1, None))
            if call is None:
                return
            try:
                results[number] = call()
            except BaseException as error:  # noqa: B036  # raised below
                errors.append(error)

    others: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(calls)) - 1):
            thread = threading.Thread(target=run, name=name)
            thread.start()
            others.append(thread)
        run()
    except BaseException as error:  # noqa: B036  # raised below
        errors.append(error)
    finally:
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]


class Worker:
    """Makes calls one after the other, on a thread that exists while there are any.

    A process that ends waits for them. As a context manager, it waits for them at its end.

    >>> with Worker("example") as worker:
    ...     worker.submit(lambda: 3).result()
    3
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The future of a call, which is made when those before it have ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=False)
                thread.start()
                self._thread = thread
            self._calls.append((future, call))
        return future

    def wait(self) -> None:
        """Wait until all calls have ended."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: B036  # the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)
