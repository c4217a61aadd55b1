"""Threads that a save in the background may start while the interpreter ends.

A process that ends waits for its save.  By then executors of `concurrent.futures` take no more work, so a save that
used one would fail, without an error that the program sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

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
