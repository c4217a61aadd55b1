"""Short turns at the interpreter's lock while a save runs in the background.

A thread that needs the lock waits 5 ms for one that computes in Python (`sys.getswitchinterval()`). A save does so
after each write, and training does so whenever it returns from PyTorch while the save plans. With turns of 0.5 ms both
wait a tenth of that. The interval belongs to the process, so it is restored when no save runs any more, unless
something else has changed it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TURN: Final = 0.0005  # seconds: long in comparison with what a change of threads costs
_lock = threading.Lock()
_inside: list[threading.Thread] = []
_before: float | None = None  # the interval to restore


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside, threads wait at most 0.5 ms for another to release the lock; several threads may be inside at once."""
    thread = threading.current_thread()
    try:
        with _lock:
            _inside.append(thread)
            _shorten()
        yield
    finally:
        with _lock:
            if thread in _inside:
                _inside.remove(thread)
            _restore()


def _shorten() -> None:
    global _before
    now = sys.getswitchinterval()
    if _before is None and now > _TURN:
        _before = now
        sys.setswitchinterval(_TURN)


def _restore() -> None:
    """Restore the interval if no thread is inside; one that has ended without leaving does not count."""
    global _before
    if any(thread.is_alive() for thread in _inside):
        return
    _inside.clear()
    before, _before = _before, None
    if before is not None and abs(sys.getswitchinterval() - _TURN) < 1e-6:
        sys.setswitchinterval(before)


def _in_forked_process() -> None:
    """Restore the interval: a forked process has the threads of its parent no longer."""
    global _lock
    _lock = threading.Lock()
    _inside.clear()
    _restore()


os.register_at_fork(after_in_child=_in_forked_process)
