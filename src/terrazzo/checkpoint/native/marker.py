"""A file by which programs for PyTorch's checkpoints recognise one of terrazzo's.

Some take a folder for a checkpoint if it has a `.metadata`, which PyTorch writes last: torchtitan looks for the newest
one so, and would begin anew, in silence, where there is none.  After `terrazzo.install()` they save in terrazzo's
format, whose folders then have a file of that name, too, once they are whole.  Nothing reads it here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from terrazzo._torch import replaced
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.stores.base import ABSENT, Store
from terrazzo.errors import ConflictError

MARKER: Final = ".metadata"
_TEXT: Final = f"a checkpoint of terrazzo, whose table of contents is {MANIFEST}; load it with terrazzo\n"
_LOGGER: Final = logging.getLogger("terrazzo.checkpoint")
_told = False  # in a process that saves for another: whether that one wants it


def wanted() -> bool:
    """Whether programs for PyTorch's checkpoints are at work here."""
    return _told or replaced.any_replaced()


@contextmanager
def as_told(wanted: bool) -> Iterator[None]:
    """Within, as it is in the process that this one saves for."""
    global _told
    before, _told = _told, wanted
    try:
        yield
    finally:
        _told = before


def leave(store: Store) -> None:
    """Put the file there if it is wanted, and if there is none; the checkpoint is whole already."""
    if not wanted():
        return
    try:
        store.put(MARKER, _TEXT.encode(), only_if=ABSENT)
    except ConflictError:
        return
    except OSError as error:
        _LOGGER.warning("%s: %s could not be written, by which some programs look: %s", store.location, MARKER, error)
