"""Names of files and folders that are read from a checkpoint, so that they may be damaged or hostile; and the file by
which programs for PyTorch's checkpoints recognise one of terrazzo's.

Some programs treat a folder as a checkpoint if it has a `.metadata`, which PyTorch writes last: torchtitan looks for
the newest such folder, and silently begins anew if there is none. After `terrazzo.install()` they save in terrazzo's
format, whose folders then also get a file of that name, after the commit. terrazzo does not read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores import Place
from terrazzo.checkpoint.stores.base import ABSENT, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointManagerError, ConflictError

# Files that name the folder, beside them, of the last checkpoint; and of the last that DeepSpeed made universal.
LATEST: Final = ("latest", "latest_universal")
JOB: Final = "job.lease"  # file in the run's folder that names the live job that saves there
_LONGEST_TAG: Final = 4096
_STEP: Final = re.compile(r"global_step(0|[1-9][0-9]{0,17})")


def is_plain_name(name: str) -> bool:
    """Whether a name, of folders too, stays within the folder that it is looked up in, if no link leads out of it.

    >>> is_plain_name("shards/0.bin"), is_plain_name("../secret"), is_plain_name("/etc/passwd"), is_plain_name("a\\0")
    (True, False, False, False)
    """
    parts = name.split("/")
    try:
        short = all(len(os.fsencode(part)) < 256 for part in parts)
    except UnicodeError:
        return False
    return short and "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def name_of_step(step: int) -> str:
    """The name of the folder of a step's checkpoint, in the folder of a run.

    >>> name_of_step(100), step_of_name("global_step100"), step_of_name("global_step100-old")
    ('global_step100', 100, None)
    """
    return f"global_step{step}"


def step_of_name(name: str) -> int | None:
    """The step whose checkpoint has this name; None if it is none of `name_of_step`."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def name_as_latest(folder: Place, name: str, check: Callable[[], None] | None = None) -> None:
    """Write the name of a committed checkpoint into the folder's file `latest`.

    `check` raises if this job has lost the folder to another one. What that one writes is not replaced.
    """
    while True:
        replacing = None if check is None else folder.store.present(LATEST[0])
        if check is not None:
            check()
        try:
            folder.store.put(LATEST[0], name.encode(), only_if=replacing)
        except ConflictError:
            if check is None:
                raise
            continue  # by another job, as `check` says then, or by this job's engine
        return


def named_by_latest(folder: Place, names: Sequence[str] = LATEST) -> list[Place]:
    """The folders that the files `latest` and `latest_universal` name, whether they exist or not."""
    found: list[Place] = []
    for name in names:
        file = folder / name
        if file.local is not None and file.local.is_dir():
            continue
        try:
            text = bytes(folder.store.get(name, _LONGEST_TAG)[0]).decode()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UnicodeDecodeError, CheckpointCorruptError) as error:
            raise CheckpointFormatError(f"{file} does not hold the name of a folder ({error})") from error
        # As other programs write it, as it is, or as DeepSpeed reads it: a tag may begin and end with white space.
        tags = [tag for tag in dict.fromkeys((text.removesuffix("\n"), text, text.strip())) if tag]
        if not tags or not all("/" not in tag and is_plain_name(tag) for tag in tags):
            raise CheckpointFormatError(f"{file} holds {text[:100]!r}, which is not the name of a folder beside it")
        folders = [folder / tag for tag in tags]
        found.append(next((place for place in folders if place.is_dir()), folders[0]) if tags[1:] else folders[0])
    return found


def check_holds_checkpoints(folder: Place) -> None:
    """Raise if the folder of a run is a file, or a checkpoint itself: no checkpoint would be found in it."""
    if folder.local is not None and folder.local.is_file():
        raise CheckpointManagerError(
            f"{folder} is a file, and the checkpoints of a run are in a folder: name that folder"
        )
    if (folder / MANIFEST).is_file():
        raise CheckpointManagerError(
            f"{folder} is a checkpoint itself, and not the folder of a run with its checkpoints: name the folder that "
            "it is in, or read it by load(state, checkpoint_id=...)"
        )


# ------------------------------------------------------------------ the file by which other programs recognise one


MARKER: Final = ".metadata"
# PyTorch unpickles the file: "c", and the names of a module and of something in it. There is no module of this name, so
# its error shows it.
_TEXT: Final = "cThis is a checkpoint of terrazzo: load it with terrazzo, or convert it by `terrazzo convert`\nload\n."
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


def leave_marker(store: Store) -> None:
    """Write the file if it is wanted and missing; called after the commit."""
    if not for_torch():
        return
    try:
        store.put(MARKER, _TEXT.encode(), only_if=ABSENT)
    except ConflictError:
        return
    except OSError as error:
        LOGGER.warning("%s: %s could not be written, by which some programs look: %s", store.location, MARKER, error)


def remove_marker(store: Store) -> None:
    """Delete the file, if it is all that is left of a checkpoint of terrazzo."""
    if [entry.key for entry in store.list()] == [MARKER]:
        with suppress(FileNotFoundError, CheckpointCorruptError):  # of another program
            if store.get(MARKER, len(_TEXT))[0] == _TEXT.encode():
                store.delete([MARKER])
