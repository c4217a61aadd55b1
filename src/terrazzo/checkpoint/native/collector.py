"""A context manager that pauses Python's garbage collector.

Planning makes many small objects that all live until the plan has been carried out. Each time enough of them
have been made, the collector looks at every object of the process, finds nothing to collect, and has cost more
than the planning. It would do so as soon as it is enabled again, so the objects that exist then are moved to the
oldest generation, which is rarely collected.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from terrazzo._threads import WhileInside

_was_enabled = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """No automatic collections inside; several threads may be inside at once.

    >>> with paused_collector():
    ...     gc.isenabled()
    False
    """
    with _paused.inside():
        yield


def _pause() -> None:
    global _was_enabled
    _was_enabled = _was_enabled or gc.isenabled()
    gc.disable()


def _go_on() -> None:
    global _was_enabled
    was_enabled, _was_enabled = _was_enabled, False
    if was_enabled:
        if not _has_frozen():
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@cache
def _has_frozen() -> bool:
    """Whether the user has frozen objects, which would be thawed. Asked once: the answer counts them all."""
    return gc.get_freeze_count() > 0


_paused: Final = WhileInside(_pause, _go_on)
