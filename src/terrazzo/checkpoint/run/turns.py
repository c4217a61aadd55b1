"""Short turns at the interpreter's lock while a save runs in the background.

A thread that needs the lock waits 5 ms for one that computes in Python (`sys.getswitchinterval()`).  A save does so
after every write, and training does so whenever it comes back from PyTorch while the save plans.  With turns of 0.5 ms
both wait a tenth of that.  The interval is the process's own, so it is put back when no save runs any more, unless
something else has changed it meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TURN: Final = 0.0005  # seconds: long against what a change of threads costs
_lock = threading.Lock()
_saves = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside, threads wait at most 0.5 ms for another to let go of the lock; several threads may be inside at once."""
    global _saves, _before
    with _lock:
        if _saves == 0:
            _before = sys.getswitchinterval()
            if _before > _TURN:
                sys.setswitchinterval(_TURN)
        _saves += 1
    try:
        yield
    finally:
        with _lock:
            _saves -= 1
            if _saves == 0 and _before > _TURN and abs(sys.getswitchinterval() - _TURN) < 1e-6:
                sys.setswitchinterval(_before)
