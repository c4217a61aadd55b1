"""Short turns at the interpreter's lock while a save runs in the background.

A thread that needs the lock waits 5 ms for one that computes in Python (`sys.getswitchinterval()`). A save does so
after each write, and training does so whenever it returns from PyTorch while the save plans. With turns of 0.5 ms both
wait a tenth of that. The interval belongs to the process, so it is restored when no save runs any more, unless
something else has changed it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Final

from terrazzo._threads import WhileInside

_TURN: Final = 0.0005  # seconds: long in comparison with what a change of threads costs
_before: float | None = None  # the interval to restore


def short_turns() -> AbstractContextManager[None]:
    """Inside, threads wait at most 0.5 ms for another to release the lock; several threads may be inside at once."""
    return _short.inside()


def _shorten() -> None:
    global _before
    now = sys.getswitchinterval()
    if _before is None and now > _TURN:
        _before = now
        sys.setswitchinterval(_TURN)


def _restore() -> None:
    global _before
    before, _before = _before, None
    if before is not None and abs(sys.getswitchinterval() - _TURN) < 1e-6:
        sys.setswitchinterval(before)


_short: Final = WhileInside(_shorten, _restore)
