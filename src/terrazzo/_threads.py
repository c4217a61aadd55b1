"""Threads that may be started while the interpreter ends.

A process that ends waits for its saves, and for what follows them. By then executors of `concurrent.futures` accept no
more work, so what used one would fail, without an error that the program sees.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")


def streams_of_this_thread() -> Callable[[], None]:
    """A function that gives the thread that calls it this thread's current device and streams of the accelerator.

    A new thread has device 0 and the default streams. Work that it queues for a tensor would not come after what the
    thread that has made the tensor has queued on a stream of its own.
    """
    torch = sys.modules.get("torch")  # without it there are no tensors
    accelerator = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or accelerator is None or not _is_initialized(torch.get_device_module(accelerator)):
        return lambda: None
    streams = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]
    device = torch.accelerator.current_device_index()

    def take() -> None:
        # Only what differs: to make a device current may allocate memory there.
        for stream in streams:
            if torch.accelerator.current_stream(stream.device) != stream:
                torch.accelerator.set_stream(stream)
        if torch.accelerator.current_device_index() != device:
            torch.accelerator.set_device_index(device)

    return take


def _is_initialized(module: Any) -> bool:
    """Whether this process has used the accelerator; one that does not say so has."""
    return bool(getattr(module, "is_initialized", module.is_available)())


def results_of(calls: Sequence[Callable[[], T]], threads: int, name: str) -> list[T]:
    """The results of all calls, of which so many run at once; or the first error, when all that had begun have ended.

    All calls have the current device and streams of this thread.

    >>> results_of([lambda: 1, lambda: 2, lambda: 3], 2, "example")
    [1, 2, 3]
    """
    results: dict[int, T] = {}
    if min(threads, len(calls)) < 2:
        for number, call in enumerate(calls):
            results[number] = call()
        return [*results.values()]
    errors: list[BaseException] = []
    left = iter(enumerate(calls))
    lock = threading.Lock()
    take_streams = streams_of_this_thread()

    def run() -> None:
        while not errors:
            with lock:
                number, call = next(left, (-1, None))
            if call is None:
                return
            try:
                take_streams()
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


_of_this_process: weakref.WeakKeyDictionary[Future[Any], Callable[[str], BaseException]] = weakref.WeakKeyDictionary()


def of_this_process(future: Future[T], error: Callable[[str], BaseException] = RuntimeError) -> Future[T]:
    """The future, whose work a thread of this process does. In a forked process, which does not have that thread, the
    future has an error at once, instead of being waited for without end.
    """
    _of_this_process[future] = error
    return future


def _fail_futures_of_parent() -> None:
    for future, error in list(_of_this_process.items()):
        vars(future)["_condition"] = threading.Condition()  # a thread of the parent may have had the old one
        if not future.done():
            vars(future)["_done_callbacks"] = []  # they would go on with what the parent does
            future.set_exception(
                error(f"this runs in process {os.getppid()}, from which process {os.getpid()} was forked: ask there")
            )


os.register_at_fork(after_in_child=_fail_futures_of_parent)


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work, and set the future's result, or its error.

    >>> future = Future()
    >>> settle(future, lambda: 3)
    >>> future.result()
    3
    """
    try:
        result = work()
    except BaseException as error:  # noqa: B036  # the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)


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
        _workers.add(self)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The future of a call, which is made when those before it have ended.

        It has the current device and streams of this thread.
        """
        future: Future[T] = of_this_process(Future())
        take_streams = streams_of_this_thread()

        def call_as_here() -> T:
            take_streams()
            return call()

        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=False)
                thread.start()
                self._thread = thread
            self._calls.append((future, call_as_here))
        return future

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all calls have ended, for at most so many seconds; returns whether they have."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

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
            if future.set_running_or_notify_cancel():
                settle(future, call)

    def _in_forked_process(self) -> None:
        """Have no calls: those of the parent are made there, on a thread that does not exist here."""
        self._lock = threading.Lock()
        self._calls.clear()
        self._thread = None


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _reset_workers() -> None:
    for worker in _workers:
        worker._in_forked_process()


os.register_at_fork(after_in_child=_reset_workers)
