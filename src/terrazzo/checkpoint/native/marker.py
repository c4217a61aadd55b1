"""A file by which programs for PyTorch's checkpoints recognise one of terrazzo's.

Some programs treat a folder as a checkpoint if it has a `.metadata`, which PyTorch writes last: torchtitan looks for
the newest such folder, and silently begins anew if there is none. After `terrazzo.install()` they save in terrazzo's
format, whose folders then also get a file of that name, after the commit. terrazzo does not read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.stores.base import ABSENT, Store
from terrazzo.errors import CheckpointFormatError, ConflictError

MARKER: Final = ".metadata"
_TEXT: Final = f"a checkpoint of terrazzo, whose table of contents is {MANIFEST}; load it with terrazzo\n"
_LOGGER: Final = logging.getLogger("terrazzo.checkpoint")
_told = False  # in a process that saves for another process: what `for_torch` is in that one


def for_torch() -> bool:
    """Whether this process runs, or saves for, a program for PyTorch's checkpoints, under `terrazzo.install()`."""
    from terrazzo._torch import replaced  # late: commands that only look at a checkpoint do not import PyTorch

    return _told or replaced.any_replaced()


@contextmanager
def as_told(value: bool) -> Iterator[None]:
    """A context manager inside which `for_torch` has the value of the process that this one saves for."""
    global _told
    before, _told = _told, value
    try:
        yield
    finally:
        _told = before


def check_is_newest(folder: Path | None) -> None:
    """Raise if PyTorch has saved into a folder after terrazzo did: its checkpoint would not be what is read."""
    if folder is None or not (folder / MARKER).is_file():
        return
    with (folder / MARKER).open("rb") as file:
        if file.read(len(_TEXT) + 1) == _TEXT.encode():
            return
    if (folder / MARKER).stat().st_mtime_ns > (folder / MANIFEST).stat().st_mtime_ns:
        raise CheckpointFormatError(
            f"{folder} holds two checkpoints, terrazzo's ({MANIFEST}) and a later one of PyTorch ({MARKER}): move one "
            f"of the two files, with its data, to another folder, or load with storage_reader=FileSystemReader(...) "
            f"or DCPReader(...)"
        )


def leave(store: Store) -> None:
    """Write the file if it is wanted and missing; called after the commit."""
    if not for_torch():
        return
    try:
        store.put(MARKER, _TEXT.encode(), only_if=ABSENT)
    except ConflictError:
        return
    except OSError as error:
        _LOGGER.warning("%s: %s could not be written, by which some programs look: %s", store.location, MARKER, error)
